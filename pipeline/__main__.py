"""`python -m pipeline`, which is what `varve pipeline` becomes."""

import signal

if __name__ == "__main__":
    # While modules are loaded there is nothing to give up: Ctrl-C ends the process without a stack.
    # `telling` turns it into an exception again, before a command begins. An ignored one stays so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from pipeline.cli import pipeline

    pipeline(prog_name="varve pipeline")
