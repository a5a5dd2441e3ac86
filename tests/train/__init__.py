"""Tests of the step: optimizer, engines, loop."""

import os

# DeepSpeed binds to one kind of device at its first import, and these tests run on CPU wherever they run.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
