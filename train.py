"""Train any model under any parallel strategy: python train.py parallel=pipe_ddp model=gpt2 (--help lists the rest)."""

from launchers import stopping

if __name__ == "__main__":
    stopping.install_handlers()  # before the imports below, which take seconds: a signal during them is not lost

from training.command_line import main

if __name__ == "__main__":
    raise SystemExit(main())
