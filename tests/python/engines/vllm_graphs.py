"""Graphs as vLLM-Ascend makes them: captured by its wrapper, replayed while a second stream renews the arguments."""

import torch
from engines import vllm_engine
from vllm.compilation.monitor import set_cudagraph_capturing_enabled
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm_ascend.compilation import acl_graph


class Captured:
    """A model's layers of attention in a graph of `tokens` tokens."""

    def __init__(self, setup, backend, tokens, layers, sinks=False):
        self.setup, self.backend, self.tokens, self.sinks = setup, backend, tokens, sinks
        self.names = [vllm_engine.LAYER.format(layer) for layer in range(layers)]
        self.updates = torch.npu.Stream()
        acl_graph._graph_params = None
        acl_graph.set_graph_params([tokens])

    def capture(self, model, metadata):
        self.model = acl_graph.ACLGraphWrapper(model, self.setup, CUDAGraphMode.FULL)
        set_cudagraph_capturing_enabled(True)
        try:
            with self.forward(metadata, capturing=True):
                self.model()
        finally:
            set_cudagraph_capturing_enabled(False)

    def replay(self, metadata):
        with self.forward(metadata) as context:
            outputs = self.model()
            acl_graph.update_full_graph_params(
                self.backend,
                self.updates,
                context,
                self.tokens,
                self.setup,
                self.setup.speculative_config,
            )
        torch.npu.synchronize()
        return outputs

    def forward(self, metadata, capturing=False):
        return vllm_engine.forward(
            self.setup,
            dict.fromkeys(self.names, metadata),
            self.tokens,
            capturing,
            self.sinks,
            cudagraph_runtime_mode=CUDAGraphMode.FULL,
            batch_descriptor=BatchDescriptor(num_tokens=self.tokens, uniform=True),
        )
