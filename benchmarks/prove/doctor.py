"""`make prove-doctor`: the doctor names the cause of each planted story, and says nothing of a healthy run.

In: a folder to work in. Out: claims, one a story of tests/doctor.
"""

import shutil
import sys
from pathlib import Path

from claims import Claims

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.doctor.stories import healthy, write_run
from tests.doctor.test_examine import STORIES

from headrace.doctor.evidence import gather
from headrace.doctor.examine import examine


def main(folder: Path) -> None:
    """Write each story as a run's files and let the doctor read them."""
    shutil.rmtree(folder, ignore_errors=True)
    claims = Claims("the doctor")
    for story, (changes, name, kind) in STORIES.items():
        root = folder / story.replace(" ", "-")
        served = write_run(root, healthy(root / "prepared", **changes))
        found = [(one.name, one.kind) for one in examine(gather(root, served if served.exists() else None))]
        told = ", ".join(f"{one} ({how})" for one, how in found if how != "note") or "nothing"
        claims.add(f"story: {story}", f"{name} ({kind})", told, (name, kind) in found)
    root = folder / "healthy"
    served = write_run(root, healthy(root / "prepared"))
    found = [(one.name, one.kind) for one in examine(gather(root, served))]
    told = ", ".join(name for name, _ in found) or "nothing"
    claims.add("a healthy run", "no finding but the forecast", told, found == [("forecast", "note")])
    claims.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
