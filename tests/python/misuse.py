"""Misuse of operators: lints of calls, and a finding that a queue of tasks swallows."""

import json
import tempfile

from harness import case, strictly

WINDOW = """
import torch, torch_npu
rows = torch.randn(1, 8, 48, 64).half().npu()
for _ in range(3):
    torch_npu.npu_fused_infer_attention_score(rows, rows, rows, num_heads=8, input_layout="BNSD", pre_tokens={window})
torch.npu.synchronize()
print("done")
"""


@case(window=[2147483647, 16])
def a_lost_window_is_told_once(window):
    """A window without a mask hides nothing: a lint, which each call breaks and which stderr names once."""
    with tempfile.NamedTemporaryFile("r") as trace:
        code, said = strictly(WINDOW.format(window=window), ASCEND_EMU_TRACE=trace.name)
        calls = [json.loads(line)["function"] for line in trace]
    assert code == 0 and "done" in said, said
    launched = [name for name in calls if name.startswith("aclnnFusedInferAttentionScore")]
    assert len([name for name in launched if not name.endswith("WorkspaceSize")]) == 3, launched
    assert said.count("tokens.without_mask") == (window == 16), said
    assert ("fix: set sparseMode to 4, give attenMask as BOOL [2048, 2048]" in said) == (window == 16), said


@case()
def a_lint_can_be_an_error():
    code, said = strictly(WINDOW.format(window=16), ASCEND_EMU_LINTS="error")
    assert code != 0 and "done" not in said, said
    assert "RuntimeError" in said and "tokens.without_mask" in said, said


SPOILED = """
import torch, torch_npu
rows, cache = torch.randn(6, 2, 64).half().npu(), torch.zeros(4, 128, 128).half().npu()
table = torch.full((6, 1), 9, dtype=torch.int32).npu()
output, _ = torch_npu.npu_fused_infer_attention_score(
    rows[:, None].reshape(6, 1, 128), cache, cache, num_heads=2, input_layout="BSH", block_table=table, block_size=128,
    actual_seq_lengths_kv=[128] * 6)
for what in [lambda: output.cpu(), lambda: torch.npu.synchronize(), lambda: torch.ones(3).npu().cpu()]:
    try:
        what()
        print("taken", flush=True)
    except RuntimeError as error:
        print("told:", error, flush=True)
import os
os._exit(0)
"""


@case()
def a_device_that_failed_has_no_results():
    """Each wait and copy behind a finding says what it is, and nothing is taken for a result."""
    code, said = strictly(SPOILED)
    assert code == 0 and "taken" not in said, said
    assert said.count("told:") == 3 and said.count("block out of range") >= 3, said
