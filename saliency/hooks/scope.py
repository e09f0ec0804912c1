"""Which of the managers of hooks that are open in a thread act on a call."""

from __future__ import annotations

import threading


class HookScope:
    """One manager as its hooks know it: they do not hold the manager itself, so it dies with its block."""

    def __init__(self, standing: bool, alone: bool) -> None:
        self.standing = standing
        self.alone = alone
        self.thread = threading.get_ident()
        self.closed = False

    def acts(self) -> bool:
        """Whether hooks on modules act: in this thread, with nothing open inside that is to be left alone."""
        open_here = active_scopes.marks
        if not open_here:
            return False
        if open_here[-1] is self:
            return True
        if self not in open_here:
            return False
        inside = open_here[open_here.index(self) + 1 :]
        return not any((each.alone if self.standing else not each.standing) and not each.closed for each in inside)

    def acts_on_leaves(self) -> bool:
        """Whether hooks on leaves, which all threads share, act: not for a backward pass of another thread.

        An accelerator's backward pass runs in a thread of the engine's own, of which nobody can tell who asked for it.
        """
        return not self.closed and (
            threading.get_ident() == self.thread or isinstance(threading.current_thread(), threading._DummyThread)
        )


class _Opened(threading.local):
    """The managers that are open in a thread, each by its mark, the innermost last."""

    def __init__(self) -> None:
        self.marks: list[HookScope] = []

    def add(self, mark: HookScope) -> None:
        """One more, now the innermost. Those that another thread has closed are forgotten."""
        self.marks[:] = [*(each for each in self.marks if not each.closed), mark]


active_scopes = _Opened()
