"""What the project promises about itself: each test file runs in CI, the floors are complete, the pins cover what is installed."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_each_test_file_is_collected_by_the_ci_run() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    collected = {line.split("::", 1)[0] for line in result.stdout.splitlines() if "::" in line}
    present = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py") if re.match(r"test_.*|.*_test", path.stem)}
    assert collected == present


def test_each_file_with_test_functions_is_named_as_a_test_file() -> None:
    strays = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("*.py")
        if not path.name.startswith("test_") and re.search(r"^\s*(async )?def test_", path.read_text(), re.MULTILINE)
    ]
    assert strays == []


def test_ci_runs_the_whole_of_lint_and_tests() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    for command in ("make lint", "make run .*", "make test"):
        assert re.search(rf"^{command}$", script, re.MULTILINE), command


def test_every_declared_dependency_is_pinned_exactly() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *(entry for extra in project["optional-dependencies"].values() for entry in extra)]
    names = {_normalized(re.split(r"[<>=\[; ]", entry, maxsplit=1)[0]) for entry in declared} - {"interlock"}
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][^ ;]*( ;.*)?", pin) for pin in pins), pins
    assert names <= {_normalized(pin.split("==")[0]) for pin in pins}


def test_markdown_links_inside_the_project_lead_somewhere() -> None:
    broken = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)} -> {target}")
    assert broken == []


def test_the_architecture_page_names_each_source_file() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    sections = {match[1]: match[2] for match in re.finditer(r"^### `(\w+)[/`].*?\n(.*?)(?=^###|\Z)", page, re.MULTILINE | re.DOTALL)}
    package = ROOT / "src" / "interlock"
    missing = []
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        if path.name == "__init__.py" or len(relative.parts) == 1:
            continue
        if f"`{'/'.join(relative.parts[1:])}`" not in sections.get(relative.parts[0], ""):
            missing.append(str(relative))
    assert missing == [], "add a line for each of these files to docs/architecture.md"


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
