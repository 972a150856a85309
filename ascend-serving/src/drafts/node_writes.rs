//! Writes of drafted nodes to a cache of latents, behind the tokens of their sequences, where a layer reads them.

use ascend_attention::{Element, Stream, Tensor, Violation};

use crate::backends::size;
use crate::error::Result;
use crate::kv::{BlockPool, CacheShape, LayerCache, SlotWrite, fill_slots};

use super::tree_request::TreeRequest;

/// The slots of the nodes of each request, in a cache of latents.
#[derive(Clone, Debug)]
pub(crate) struct NodeSlots {
    pool: BlockPool,
    shape: CacheShape,
    of_requests: Vec<Vec<i32>>,
}

/// The planned writes of a step's nodes, for all layers.
#[derive(Debug)]
pub(crate) struct NodeWrites {
    shape: CacheShape,
    write: SlotWrite,
}

impl NodeSlots {
    /// The slots of requests whose sequences have the nodes.
    pub(crate) fn of(pool: &BlockPool, shape: CacheShape, requests: &[TreeRequest<'_>]) -> Result<Self, Violation> {
        let of_requests = requests.iter().map(|request| {
            let nodes = request.cached..request.cached + request.tree.nodes();
            let mut slots = Vec::with_capacity(nodes.len());
            fill_slots(request.sequence.row(), nodes, pool.block_size(), &mut slots)?;
            Ok::<_, Violation>(slots)
        });
        Ok(Self { pool: pool.clone(), shape, of_requests: of_requests.collect::<Result<_, _>>()? })
    }

    /// Prepares the writes of latents `[requests, 1, nodes, 512]` and rotary keys. What is behind the nodes of a tree,
    /// and behind the last request, goes where padding goes.
    pub(crate) fn plan<T: Element>(
        &self,
        layer: &LayerCache<T>,
        stream: &Stream,
        rows: [&Tensor<T>; 2],
    ) -> Result<NodeWrites> {
        let (requests, nodes) = (size(rows[0], 0), size(rows[0], 2));
        let (pad, block_size) = (self.pool.pad_policy(), self.pool.block_size());
        let (mut slots, mut padding) = (Vec::new(), 0);
        for request in 0..requests {
            let own = self.of_requests.get(request).map_or(&[][..], |own| own);
            slots.extend_from_slice(own);
            for _ in own.len()..nodes {
                slots.push(pad.slot_of(padding, block_size)?);
                padding += 1;
            }
        }
        let [key, value] = [packed(rows[0])?, packed(rows[1])?];
        let blocks = (&self.pool, &self.shape);
        Ok(NodeWrites { shape: self.shape, write: SlotWrite::plan(blocks, layer, stream, &slots, [&key, &value])? })
    }
}

impl NodeWrites {
    /// Queues the writes of a layer.
    pub(crate) fn queue<T: Element>(
        &self,
        layer: &LayerCache<T>,
        stream: &Stream,
        rows: [&Tensor<T>; 2],
    ) -> Result<()> {
        let [key, value] = [packed(rows[0])?, packed(rows[1])?];
        self.write.queue(&self.shape, layer, stream, [&key, &value])
    }
}

/// The rows of nodes, of one head, as those of tokens.
fn packed<T: Element>(rows: &Tensor<T>) -> Result<Tensor<T>> {
    let tokens = size(rows, 0) * size(rows, 2);
    Ok(rows.reshape([tokens, 1, size(rows, 3)])?)
}
