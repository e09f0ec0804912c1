"""Targets: functions from the model's output to one score per image."""
