"""The exceptions of the simulator: a kernel that is wrong, or one that it cannot run."""


class Fault(Exception):
    """The kernel did something that is wrong on hardware: the message names the PTX line and what happened."""


class Deadlock(Fault):
    """No thread can move and no asynchronous operation is left; the message lists every warp and barrier."""


class Livelock(Fault):
    """The step limit was exceeded."""


class NotModelled(NotImplementedError):
    """The simulator does not model this form; the message names the PTX line."""
