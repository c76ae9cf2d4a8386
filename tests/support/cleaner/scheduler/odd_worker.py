"""A worker process whose jobs do what their run id says, and no cleaning."""

import os
import signal
import sys
import time

from cleaner.job import CleanAbortedError, CleanJob, CleanReport, JobControl
from cleaner.workers.worker import finish_start, prepare, serve
from storage.env import Env, RealEnv
from tests.support.cleaner.cleaner_jobs import group_of, report_of


def run(env: Env, job: CleanJob, control: JobControl) -> CleanReport:
    subject = job.job_id
    if subject == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if subject == "raise":
        raise OSError(28, "No space left on device", "/data/t-0/x")
    if subject == "hang":
        time.sleep(600)
    if subject == "work":
        while not control.aborted():
            control.read_bytes(4096)
            control.progress("map", 1, 2)
            time.sleep(0.001)
        raise CleanAbortedError
    for index in range(len(job.groups)):
        control.read_bytes(100)
        control.write_bytes(50)
        control.groups_cleaned((group_of(job, index),))
    return report_of(job)


if __name__ == "__main__":
    preparation = prepare(sys.argv[1:])
    if preparation is None:
        sys.exit(1)
    env = RealEnv()
    finish_start(preparation)
    sock, memory_fd, _ = preparation
    serve(sock, memory_fd, run, env, env.monotonic())
