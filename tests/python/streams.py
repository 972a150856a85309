"""Streams, events, pinned memory and threads, with the strict checks of the emulation on."""

import threading

import torch
import torch_npu

from harness import case, close, counted, strictly
from reference import attend
from tensors import Batch, npu


def call(batch, tensors):
    counted("npu_fused_infer_attention_score")
    output, _ = torch_npu.npu_fused_infer_attention_score(
        **tensors, **batch.heads_and_scale(), input_layout="BNSD"
    )
    return output


def check(batch, output):
    expected, _ = batch.expected(attend)
    close(output[0], expected[0])


@case(rounds=[4])
def two_streams_ordered_by_events(rounds):
    """One stream brings the inputs of the next call while the other computes."""
    copies, compute = torch.npu.Stream(), torch.npu.Stream()
    batches = [Batch([20], [60], dim=128) for _ in range(rounds)]
    outputs = []
    for batch in batches:
        pinned = {
            "query": batch.query[0][None].pin_memory(),
            "key": batch.key[0][None].pin_memory(),
            "value": batch.value[0][None].pin_memory(),
        }
        with torch.npu.stream(copies):
            tensors = {name: tensor.to("npu", non_blocking=True) for name, tensor in pinned.items()}
            ready = torch.npu.Event()
            ready.record()
        with torch.npu.stream(compute):
            compute.wait_event(ready)
            output = call(batch, tensors)
            for tensor in tensors.values():
                tensor.record_stream(compute)
            outputs.append(output)
    compute.synchronize()
    for batch, output in zip(batches, outputs):
        check(batch, output)


@case()
def results_copied_while_the_host_goes_on():
    batch = Batch([20], [60])
    output = call(batch, batch.lay_out("BNSD"))
    host = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
    host.copy_(output, non_blocking=True)
    torch.npu.current_stream().synchronize()
    check(batch, host)


@case()
def memory_freed_while_queued_is_reused_in_order():
    """Tensors dropped right after the call, so that the caching allocator gives their memory to the next."""
    batches, outputs = [Batch([16], [64], dim=128) for _ in range(8)], []
    for batch in batches:
        outputs.append(call(batch, batch.lay_out("BNSD")))
    for batch, output in zip(batches, outputs):
        check(batch, output)


@case(threads=[4])
def threads_with_a_stream_each(threads):
    """The caching allocator and the operator called from several threads at once."""
    torch.npu.synchronize()
    batches = [[Batch([8], [40]) for _ in range(5)] for _ in range(threads)]
    outputs = [[] for _ in range(threads)]
    errors = []

    def work(index):
        try:
            torch.npu.set_device(0)
            stream = torch.npu.Stream()
            with torch.npu.stream(stream):
                for batch in batches[index]:
                    outputs[index].append(call(batch, batch.lay_out("BNSD")).cpu())
            stream.synchronize()
        except Exception as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not errors, errors
    for index in range(threads):
        for batch, output in zip(batches[index], outputs[index]):
            check(batch, output)


@case()
def events_tell_the_time_between_them():
    start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    batch = Batch([64], [256], dim=128)
    tensors = batch.lay_out("BNSD")
    start.record()
    output = call(batch, tensors)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) > 0
    assert start.query() and end.query()
    check(batch, output)


@case()
def two_devices():
    assert torch.npu.device_count() == 2
    batch = Batch([9], [30])
    outputs = []
    for device in (0, 1):
        with torch.npu.device(device):
            tensors = {name: tensor.cpu().to(f"npu:{device}") for name, tensor in batch.lay_out("BNSD").items()}
            outputs.append(call(batch, tensors))
            torch.npu.synchronize()
    for device, output in enumerate(outputs):
        assert output.device.index == device
        check(batch, output)


@case(size=[1 << 20, 40 << 20])
def memory_grows_and_is_given_back(size):
    before = torch.npu.memory_allocated()
    held = [torch.empty(size, dtype=torch.int8, device="npu") for _ in range(3)]
    assert torch.npu.memory_allocated() - before >= 3 * size
    host = torch.arange(size // 4, dtype=torch.int32)
    held[1].view(torch.int32).copy_(host)
    assert torch.equal(held[1].view(torch.int32).cpu(), host)
    del held
    torch.npu.empty_cache()
    assert torch.npu.memory_allocated() == before


RACE = """
import torch, torch_npu
torch.npu.set_device(0)
one, two = torch.npu.Stream(), torch.npu.Stream()
rows = torch.randn(1, 4, 64, 64).half().npu()
torch.npu.synchronize()
kept = []
for _ in range(8):
    with torch.npu.stream(one):
        output, _ = torch_npu.npu_fused_infer_attention_score(rows, rows, rows, num_heads=4, input_layout="BNSD")
    with torch.npu.stream(two):
        {order}
        again, _ = torch_npu.npu_fused_infer_attention_score(output, rows, rows, num_heads=4, input_layout="BNSD")
    one.wait_stream(two)
    kept += [output, again]
torch.npu.synchronize()
print("done")
"""


@case(ordered=[True, False])
def a_race_of_the_program_s_own_is_reported(ordered):
    """A stream that reads what another writes: with an event nothing is said, without one the strict checks fail it."""
    code, said = strictly(RACE.format(order="two.wait_stream(one)" if ordered else "pass"))
    if ordered:
        assert code == 0 and "done" in said, said
        told = [line for line in said.splitlines() if line.startswith("ascend-emu:")]
        # The extension chooses the version of an operator.
        assert all(".deprecated: " in line for line in told), said
    else:
        assert code != 0, said
        assert "race between streams" in said, said


PAGEABLE = """
import torch, torch_npu
rows = torch.randn(64, 64).npu()
host = torch.empty(64, 64, pin_memory={pinned})
host.copy_(rows, non_blocking=True)
torch.npu.synchronize()
print("done")
"""


@case(pinned=[True, False])
def copies_that_cannot_be_asynchronous_are_reported(pinned):
    """Copying without waiting into memory that is not pinned waits all the same, as on hardware: told, and no error."""
    code, said = strictly(PAGEABLE.format(pinned=pinned))
    assert code == 0 and "done" in said, said
    told = "asynchronous copy with pageable host memory" in said
    assert told != pinned, said


TABLE = """
import torch, torch_npu
rows, cache = torch.randn(6, 2, 64).half().npu(), torch.zeros(4, 128, 128).half().npu()
mask = torch.triu(torch.ones(2048, 2048), diagonal=1).to(torch.int8).npu()
table = torch.tensor([[1, {block}]], dtype=torch.int32).npu()
torch_npu.npu_fused_infer_attention_score(
    rows, cache, cache, block_table=table, block_size=128, actual_seq_lengths=[6], actual_seq_lengths_kv=[200],
    num_heads=2, num_key_value_heads=2, input_layout="TND", sparse_mode=3, atten_mask=mask)
torch.npu.synchronize()
print("done")
"""


@case(block=[3, 4])
def blocks_that_the_cache_does_not_have_are_a_fault(block):
    code, said = strictly(TABLE.format(block=block))
    if block < 4:
        assert code == 0 and "done" in said, said
    else:
        assert code != 0, said
        assert "block out of range" in said, said
