"""Kill a save at every place of the protocol, and look at what stands: `python -m tests.train.kill_points FOLDER`.

Prints a JSON object, place -> [steps that verify, what `latest` names, left after a sweep]. Its own process, since it
forks: no thread, no torch.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

from moe.train.checkpoint.folder import latest_checkpoint, sweep
from moe.train.checkpoint.protocol import Keep
from tests.train.generations import good_steps, write

KEEP = Keep(last=2)


def places(folder: Path) -> list[str]:
    """Every place that a save of step 3 passes, in order; repeated ones are numbered."""
    root = folder / "dry"
    seen: list[str] = []
    for step in (1, 2):
        write(root, step, KEEP)
    write(root, 3, KEEP, fault=seen.append)
    return seen


def kill_at(folder: Path, number: int) -> list[object]:
    """Save steps 1 and 2, then be killed in the save of step 3 at its number-th place."""
    root = folder / f"place-{number}"
    for step in (1, 2):
        write(root, step, KEEP)
    passed = []

    def fault(place: str) -> None:
        passed.append(place)
        if len(passed) == number + 1:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        write(root, 3, KEEP, fault=fault)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"place {number} was not reached"
    before = good_steps(root)
    newest = latest_checkpoint(root)
    sweep(root)
    left = sorted(path.name for path in root.iterdir())
    # The run goes on: the killed save is made again, or the next one, and nothing is in its way.
    write(root, 4, KEEP)
    result = [before, newest.name if newest else None, left, good_steps(root)]
    shutil.rmtree(root)
    return result


def main() -> None:
    """Kill at every place."""
    folder = Path(sys.argv[1])
    names = places(folder)
    print(json.dumps([[name, *kill_at(folder, number)] for number, name in enumerate(names)]))


if __name__ == "__main__":
    main()
