"""A pretended clock."""


class Clock:
    """A clock that is `step` seconds later each time it is read: a busy machine's is further ahead."""

    def __init__(self, step: float) -> None:
        self.step, self.now = step, 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now
