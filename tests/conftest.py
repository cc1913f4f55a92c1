"""What every test may rely on."""

from __future__ import annotations

import signal

# A process that was started in the background by a shell ignores Ctrl-C; tests press it, wherever they run.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
