//! A replay with the lengths of the last one, or with none.

use ascend_attention::graph::Update;
use ascend_attention::{Graph, Result, Stream};

fn stale(graph: &mut Graph<()>, stream: &Stream, update: Update) -> Result<()> {
    graph.launch(stream, update)?;
    graph.launch(stream, update)
}

fn none(graph: &mut Graph<()>, stream: &Stream) -> Result<()> {
    graph.launch(stream)
}

fn main() {}
