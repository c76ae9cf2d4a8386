"""Entry point of `python -m pipeline`, which `varve pipeline` executes."""

import signal

if __name__ == "__main__":
    # While modules are loaded, Ctrl-C ends the process without a traceback. Before a command
    # begins, `exit_on_error` turns it into an exception again. An ignored signal stays ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from pipeline.cli import pipeline

    pipeline(prog_name="varve pipeline")
