"""The interface of all methods: `attribute`, the registry, explanations, and the forward that methods share."""
