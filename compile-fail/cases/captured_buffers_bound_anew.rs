//! Another tensor for a captured graph, which goes on reading the one that it was captured with; or none.

use ascend_attention::{Graph, Tensor, bf16};

struct Buffers {
    query: Tensor<bf16>,
}

fn rebind(graph: &mut Graph<Buffers>, query: Tensor<bf16>) {
    graph.buffers().query = query;
}

fn take(graph: &Graph<Buffers>) -> Buffers {
    *graph.buffers()
}

fn main() {}
