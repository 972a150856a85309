"""Steps captured as graphs, and replayed with other lengths, as serving does."""

import torch
import torch_npu

from harness import case, close, counted
from reference import attend, right_down
from tensors import BLOCK, ends, npu, triangle

HEADS, KV_HEADS, DIM = 8, 2, 128
BLOCKS, COLUMNS = 24, 4


class Decode:
    """Inputs of a step that stay where they are, and layers with a cache each."""

    def __init__(self, requests, rows=1, layers=2):
        self.requests, self.rows = requests, rows
        tokens = requests * rows
        self.scale = DIM**-0.5
        self.query = torch.zeros(tokens, HEADS, DIM).bfloat16().npu()
        self.table = torch.zeros(requests, COLUMNS, dtype=torch.int32).npu()
        self.caches = [torch.randn(2, BLOCKS, BLOCK, KV_HEADS, DIM).bfloat16() for _ in range(layers)]
        self.on_device = [npu(cache) for cache in self.caches]
        self.outputs = [torch.zeros(tokens, HEADS, DIM).bfloat16().npu() for _ in range(layers)]
        self.mask = triangle()
        self.sinks = torch.randn(HEADS).bfloat16()
        self.ends = ends([rows] * requests)

    def fill(self, lens):
        """Another step's contents in the same tensors."""
        self.lens = lens
        self.host_query = torch.randn(self.query.shape).bfloat16()
        order = torch.randperm(BLOCKS)[: self.requests * COLUMNS].view(self.requests, COLUMNS).int()
        self.host_table = order
        self.query.copy_(self.host_query)
        self.table.copy_(order)

    def arguments(self, layer, lens):
        key, value = (self.on_device[layer][i].view(BLOCKS, BLOCK, -1) for i in (0, 1))
        return dict(
            query=self.query,
            key=key,
            value=value,
            atten_mask=self.mask,
            block_table=self.table,
            input_layout="TND",
            block_size=BLOCK,
            actual_seq_lengths=self.ends,
            actual_seq_lengths_kv=lens,
            num_key_value_heads=KV_HEADS,
            num_heads=HEADS,
            scale=self.scale,
            sparse_mode=3,
            pre_tokens=2147483647,
            next_tokens=2147483647,
        )

    def second_names(self, layer, lens):
        arguments = self.arguments(layer, lens)
        for old, new in (
            ("actual_seq_lengths", "actual_seq_qlen"),
            ("actual_seq_lengths_kv", "actual_seq_kvlen"),
            ("num_heads", "num_query_heads"),
            ("scale", "softmax_scale"),
        ):
            arguments[new] = arguments.pop(old)
        return arguments | {"next_tokens": 0, "learnable_sink": self.device_sinks}

    def check(self, sink=None):
        for layer, output in enumerate(self.outputs):
            output = output.cpu()
            for r, length in enumerate(self.lens):
                rows = slice(r * self.rows, (r + 1) * self.rows)
                pages = self.host_table[r, : -(-length // BLOCK)].long()
                key, value = (x[pages].flatten(0, 1)[:length].transpose(0, 1) for x in self.caches[layer])
                seen = right_down(self.rows, length)
                query = self.host_query[rows].transpose(0, 1)
                expected, _ = attend(query, key, value, self.scale, seen, sink=sink)
                close(output[rows], expected.transpose(0, 1), f"layer {layer}, request {r}")


STEPS = [[130, 7, 256, 1], [131, 8, 257, 2], [500, 129, 128, 512]]


@case(entry=[1, 2], rows=[1, 3])
def lengths_updated_between_replays(entry, rows):
    """Captured in task groups behind external events; an update stream gives each group its lengths."""
    step = Decode(requests=4, rows=rows)
    step.device_sinks = npu(step.sinks)
    steps = [[max(n, rows) for n in lens] for lens in STEPS]
    if entry == 1:
        operator, names = torch_npu.npu_fused_infer_attention_score, step.arguments
        max_workspace = torch_npu._npu_fused_infer_attention_score_get_max_workspace
    else:
        operator, names = torch_npu.npu_fused_infer_attention_score_v2, step.second_names
        max_workspace = torch_npu._npu_fused_infer_attention_score_v2_get_max_workspace
    captured_lens = [rows] * 4
    step.fill(captured_lens)
    graph, update_stream = torch.npu.NPUGraph(), torch.npu.Stream()
    events, handles, placeholders, workspace = [], [], [], None
    with torch.npu.graph(graph):
        for layer, output in enumerate(step.outputs):
            arguments = names(layer, captured_lens)
            if workspace is None:
                workspace = max_workspace(**arguments)
            stream = torch.npu.current_stream()
            event = torch.npu.ExternalEvent()
            event.wait(stream)
            event.reset(stream)
            events.append(event)
            # Not asked for, so it is of the wrong dtype and has one element.
            placeholders.append(torch.empty(1, dtype=step.query.dtype, device="npu"))
            torch.npu.graph_task_group_begin(stream)
            operator.out(**arguments, workspace=workspace, out=[output, placeholders[-1]])
            handles.append(torch.npu.graph_task_group_end(stream))
    for lens in steps:
        step.fill(lens)
        torch.npu.current_stream().synchronize()
        graph.replay()
        with torch.npu.stream(update_stream):
            for layer, output in enumerate(step.outputs):
                torch.npu.graph_task_update_begin(update_stream, handles[layer])
                operator.out(**names(layer, lens), workspace=workspace, out=[output, placeholders[layer]])
                torch.npu.graph_task_update_end(update_stream)
                events[layer].record(update_stream)
        torch.npu.synchronize()
        counted(operator.__name__ if hasattr(operator, "__name__") else f"entry {entry}")
        step.check(sink=step.sinks if entry == 2 else None)


@case(entry=[1, 2])
def lengths_updated_by_the_graph_itself(entry):
    """The extension's own way: captured with automatic dispatch, updated by a list of lengths."""
    step = Decode(requests=4)
    step.device_sinks = npu(step.sinks)
    captured_lens = [1] * 4
    step.fill(captured_lens)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        for layer in range(2):
            if entry == 1:
                output, _ = torch_npu.npu_fused_infer_attention_score(**step.arguments(layer, captured_lens))
            else:
                output, _ = torch_npu.npu_fused_infer_attention_score_v2(**step.second_names(layer, captured_lens))
            step.outputs[layer] = output
    name = "actual_seq_lengths_kv" if entry == 1 else "actual_seq_kvlen"
    for lens in STEPS:
        step.fill(lens)
        torch.npu.current_stream().synchronize()
        graph.replay()
        graph.update(cpu_update_input=[{name: lens}])
        torch.npu.synchronize()
        counted("npu_fused_infer_attention_score" + ("" if entry == 1 else "_v2"))
        step.check(sink=step.sinks if entry == 2 else None)


@case()
def a_graph_without_updates():
    """Without task groups a replay computes the captured lengths with what its tensors hold then."""
    step = Decode(requests=3)
    lens = [140, 60, 300]
    step.fill(lens)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        for layer in range(2):
            step.outputs[layer], _ = torch_npu.npu_fused_infer_attention_score(**step.arguments(layer, lens))
    for _ in range(3):
        step.fill(lens)
        graph.replay()
        torch.npu.synchronize()
        counted("npu_fused_infer_attention_score")
        step.check()


@case()
def a_graph_with_its_cache_write():
    """The write of the step's keys and the attention over them in one graph; slots change in place."""
    step = Decode(requests=3, layers=1)
    lens = [140, 60, 300]
    step.fill(lens)
    key, value = (torch.zeros(3, KV_HEADS, DIM).bfloat16().npu() for _ in range(2))
    slots = torch.zeros(3, dtype=torch.int32).npu()
    slots.copy_(torch.tensor([0, 1, 2], dtype=torch.int32))
    caches = step.on_device[0][0], step.on_device[0][1]
    graph = torch.npu.NPUGraph()
    torch.npu.synchronize()
    with torch.npu.graph(graph):
        torch_npu.npu_scatter_pa_kv_cache(key, value, *caches, slots, cache_mode="Norm")
        step.outputs[0], _ = torch_npu.npu_fused_infer_attention_score(**step.arguments(0, lens))
    for _ in range(2):
        step.fill(lens)
        new = torch.randn(2, 3, KV_HEADS, DIM).bfloat16()
        last = [n - 1 for n in lens]
        at = [(int(step.host_table[r, p // BLOCK]), p % BLOCK) for r, p in enumerate(last)]
        for r, (block, offset) in enumerate(at):
            step.caches[0][:, block, offset] = new[:, r]
        key.copy_(new[0])
        value.copy_(new[1])
        slots.copy_(torch.tensor([block * BLOCK + offset for block, offset in at], dtype=torch.int32))
        torch.npu.current_stream().synchronize()
        graph.replay()
        torch.npu.synchronize()
        counted("npu_scatter_pa_kv_cache")
        counted("npu_fused_infer_attention_score")
        step.check()
