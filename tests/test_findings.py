"""The list of the findings has each script, with the library and the sentence that the script begins with."""

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "findings"
HEAD = re.compile(
    r"#!/usr/bin/env bash\n# (.+?): (.+?)\n#\n# Guess: .+\n# Seen: .+\n# Source: .+\nset -euo pipefail\n", re.DOTALL
)
ROW = re.compile(r"^\| (.+?) \| \[(.+)\]\((\w+)\.sh\) \| (?:\[.+\]\((.+?)#(.+)\))? ?\|$", re.MULTILINE)


def test_the_list_is_that_of_the_scripts_and_its_links_lead_somewhere():
    begins = {}
    for path in FOLDER.glob("*.sh"):
        found = HEAD.match(path.read_text())
        assert found, f"{path.name} does not begin with library, guess, what was seen and the source"
        begins[path.stem] = tuple(" ".join(part.replace("\n#", "").split()).rstrip(".") for part in found.groups())
    rows = ROW.findall((FOLDER / "README.md").read_text())
    assert {script: (library, sentence) for library, sentence, script, _, _ in rows} == begins
    assert len(rows) == len(begins) >= 20
    for *_, page, section in rows:
        if page:
            titles = re.findall(r"^#+ (.+)$", (FOLDER / page).read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert section in slugs, (page, section)
