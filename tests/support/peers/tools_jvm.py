"""One JVM that runs many of Kafka's command line tools, one after the other."""

import atexit
import subprocess
import threading
from collections.abc import Sequence

STOP_SECONDS = 30


class ToolsJvm:
    """Runs tools in a JVM that starts with the first one. Threads may share it: they wait."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        atexit.register(self.stop)

    def run(
        self, java: Sequence[str], main_class: str, *arguments: str, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a tool; `java` is the command line of RunTools, for a JVM that has to be started."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    java, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
                )
            late = threading.Timer(timeout, self._process.kill)
            late.start()
            try:
                return _ask(self._process, [main_class, *arguments])
            except BaseException:  # the rest of its answer must not be taken for the next one
                self.stop()
                raise
            finally:
                late.cancel()

    def stop(self) -> None:
        """End the JVM, if it runs."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate(timeout=STOP_SECONDS)


def _ask(process: subprocess.Popen[bytes], words: list[str]) -> subprocess.CompletedProcess[str]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\t".join(words).encode() + b"\n")
    process.stdin.flush()
    head = process.stdout.readline()
    assert head, f"the JVM of {words[0]} ended, or it was not done in time"
    code, *sizes = map(int, head.split())
    output, errors = (process.stdout.read(size).decode() for size in sizes)
    return subprocess.CompletedProcess(words, code, output, errors)
