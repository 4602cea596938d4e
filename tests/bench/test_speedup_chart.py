"""The chart of speed-ups has a bar for every figure of the summary but plain decoding's."""

import json
import runpy
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "bench" / "smollm2-135m"


def test_every_speed_up_has_its_bar(tmp_path: Path) -> None:
    runpy.run_path(str(ROOT / "bench" / "speedup_chart.py"))["main"](str(FOLDER), str(tmp_path / "chart.svg"))
    titles = {element.text for element in ElementTree.parse(tmp_path / "chart.svg").iter() if "title" in element.tag}
    rows = json.loads((FOLDER / "summary.json").read_text())
    assert titles == {
        f"{row['method']} {row['budget']} {row['task']}: {row['speedup']:.2f}"
        for row in rows
        if row["method"] != "plain"
    }
