"""What the ranks of tests need of PyTorch and of ours: loaded once, then forked (tests.processes).

Loading only. Whatever starts threads belongs in the ranks: threads do not survive a fork.
"""

# ruff: noqa: F401
import pytest
import torch._dynamo.repro.after_dynamo
import torch._inductor.debug
import torch._inductor.pattern_matcher
import torch.distributed.tensor.experimental
import torch.export._trace

import undertow.backend.runner
import undertow.capture.parallelize
from undertow.loops import movement, reductions, scans, scatter
