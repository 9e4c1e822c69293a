"""Limit the share of a kernel's PTX that no case executes; `python -m tests.sim KERNEL --coverage` prints it."""

from ptxsim.coverage import Missing

# By op: the rest of these kernels is reached by features of other kernels, by types or by sizes that no small case has.
# Decode finds sequences in five places, each with code for more than 32 of them, of which a small case runs a few.
LIMITS = {"attention.decode": 0.16, "attention.sm90": 0.15, "topk.radix": 0.35}
GOAL = 0.02  # of other ops


def uncovered(label: str, found: Missing) -> list[str]:
    """Return an error if too much of a kernel never ran. found: `missing(result)` of all its cases, merged by
    `RunResult.add`."""
    most = LIMITS.get(label.split("/")[0], GOAL)
    return [f"{found.share:.1%} of its PTX never ran, at most {most:.0%} may"] if found.share > most else []
