//! Drafted trees of multi-head latent attention verified by graphs, layer by layer.

use std::fmt;

use ascend_attention::attention::CallLengths;
use ascend_attention::case::tentatively;
use ascend_attention::graph::Capturing;
use ascend_attention::{Element, Output, Stream, Tensor};

use crate::backends::{LatentForm, LatentTensors};
use crate::drafts::{
    LatentTreeTensors, LatentTreeVerification, has_no_such_call, latent_nodes, latent_paged,
};
use crate::engine::LayerInputs;
use crate::error::Result;
use crate::kv::{LayerCache, PagedKvCache, StepLease};

use super::graph_limits::GraphLimits;
use super::tree_graphs::{of_context, record_two};
use super::tree_pool::{
    TreeBuffers, TreeExtents, TreeLengths, TreePool, TreePoolStep, TreeRequest, TreeTables,
    not_of_trees,
};

/// Verifications of drafted trees over a cache of latents, replayed from graphs that were captured for a few numbers
/// of requests: one graph of each layer. From [`LatentTreeVerification::capture`]. [`LatentTreeVerification`]
/// computes the same without graphs and lists the calls of each target: one of sparse mode 9, or two and a merge.
///
/// The mask of the trees is part of the buffers, so that each step has trees of its own of up to the captured nodes.
/// The nodes are the last tokens of their sequences, in the cache before the layer is replayed.
pub struct LatentTreeGraphs<T: Element> {
    pool: TreePool<LatentBuffers<T>>,
    is_one_call: bool,
}

/// The buffers of the graphs of a size: absorbed queries of the nodes and their rotary parts, and latents and rotary
/// keys of the nodes, `[size, heads, nodes, dim]`.
#[derive(Debug)]
pub struct LatentGraphTensors<T: Element> {
    /// Absorbed queries, `[size, N, nodes, 512]`.
    pub query: Tensor<T>,
    /// Their rotary parts, `[size, N, nodes, 64]`.
    pub query_rope: Tensor<T>,
    /// Latents of the nodes, `[size, 1, nodes, 512]`.
    pub latent: Tensor<T>,
    /// Rotary keys of the nodes, `[size, 1, nodes, 64]`.
    pub key_rope: Tensor<T>,
    /// The attention, `[size, N, nodes, 512]`, to be projected.
    pub attention: Tensor<T>,
}

#[derive(Debug)]
struct LatentBuffers<T: Element> {
    tables: TreeTables,
    tensors: LatentGraphTensors<T>,
    /// The outputs of two calls, which a merge reads, and the merged log-sum-exps; `None` for a single call.
    two: Option<([Output<T>; 2], Tensor<f32>)>,
}

impl<T: Element> TreeBuffers for LatentBuffers<T> {
    fn tables(&self) -> &TreeTables {
        &self.tables
    }
}

impl<T: Element> LatentBuffers<T> {
    fn inputs<'a>(&'a self, cache: &'a LayerCache<T>) -> LatentTreeTensors<'a, T> {
        LatentTreeTensors {
            query: &self.tensors.query,
            query_rope: &self.tensors.query_rope,
            latent: &self.tensors.latent,
            key_rope: &self.tensors.key_rope,
            cache,
            block_table: &self.tables.block_table,
        }
    }
}

/// The lengths of the single call over cached tokens and nodes.
fn of_both(lengths: &TreeLengths) -> CallLengths<'_> {
    CallLengths::Batched {
        q: Some(&lengths.nodes),
        kv: &lengths.cached,
    }
}

impl LatentTreeVerification {
    /// Captures the verification of trees of up to [`GraphLimits::tokens_each`] nodes for every layer of a cache; the
    /// keys of the limits are a request's tokens in the cache, its nodes included.
    ///
    /// # Errors
    /// [`GRAPH_SIZE`](crate::rules::GRAPH_SIZE) for limits without sizes, or with one of 0 nodes;
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) or [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a
    /// stream of another device, a scale that is 0 or not finite, and sinks, which no verification has;
    /// [`GRAPH_STREAMS`](crate::rules::GRAPH_STREAMS) if the graphs take too many streams; a broken rule of the two
    /// calls, where the single call is refused too; as for [`Graph::capture`](ascend_attention::Graph::capture).
    pub fn capture<T: Element>(
        &self,
        stream: &Stream,
        cache: &PagedKvCache<T>,
        limits: &GraphLimits,
    ) -> Result<LatentTreeGraphs<T>> {
        self.shape.check()?;
        let captured = |is_one_call: bool| -> Result<LatentTreeGraphs<T>> {
            let pool = TreePool::capture(
                stream,
                cache,
                limits,
                true,
                |extents| self.buffers(stream, cache, extents, is_one_call),
                |capture, extents, layer, buffers| {
                    self.record(capture, cache.layer(layer)?, extents, buffers)
                },
            )?;
            Ok(LatentTreeGraphs { pool, is_one_call })
        };
        tentatively(|| match captured(true) {
            Err(why) if has_no_such_call(&why) => captured(false),
            other => other,
        })
    }

    fn buffers<T: Element>(
        &self,
        stream: &Stream,
        cache: &PagedKvCache<T>,
        extents: TreeExtents,
        is_one_call: bool,
    ) -> Result<LatentBuffers<T>> {
        let (device, of, heads) = (stream.device(), cache.shape(), self.shape.heads);
        let TreeExtents {
            requests, nodes, ..
        } = extents;
        let tensor = |heads, dim| Tensor::<T>::empty(device, [requests, heads, nodes, dim]);
        let lse = || Tensor::<f32>::empty(device, [requests, heads, nodes, 1]);
        let output = || -> Result<Output<T>> {
            Ok(Output {
                attention: tensor(heads, of.key_dim)?,
                softmax_lse: Some(lse()?),
            })
        };
        Ok(LatentBuffers {
            tables: TreeTables::new(stream, cache.pool().block_size(), extents)?,
            tensors: LatentGraphTensors {
                query: tensor(heads, of.key_dim)?,
                query_rope: tensor(heads, of.value_dim)?,
                latent: tensor(1, of.key_dim)?,
                key_rope: tensor(1, of.value_dim)?,
                attention: tensor(heads, of.key_dim)?,
            },
            two: match is_one_call {
                true => None,
                false => Some(([output()?, output()?], lse()?)),
            },
        })
    }

    fn record<T: Element>(
        &self,
        capture: &Capturing<'_>,
        cache: &LayerCache<T>,
        extents: TreeExtents,
        buffers: &LatentBuffers<T>,
    ) -> Result<()> {
        let inputs = buffers.inputs(cache);
        let mask = buffers.tables.mask.clone();
        let paged = latent_paged(&inputs);
        let mut output = Output {
            attention: buffers.tensors.attention.clone(),
            softmax_lse: buffers.two.as_ref().map(|(_, lse)| lse.clone()),
        };
        if let Some((parts, _)) = &buffers.two {
            let own = latent_nodes(&inputs);
            let calls = self.two_calls(mask);
            return record_two(calls, capture, extents, [&own, &paged], parts, &output);
        }
        let call = self.one_call(mask);
        let call = capture.attention(&call, of_both(&extents.longest()?), paged)?;
        Ok(capture.launch_into(call, paged, &mut output)?)
    }
}

impl<T: Element> LatentTreeGraphs<T> {
    /// The captured sizes, in requests, ascending.
    pub fn sizes(&self) -> impl Iterator<Item = usize> + '_ {
        self.pool.sizes()
    }

    /// Most nodes of a tree.
    pub fn nodes(&self) -> usize {
        self.pool.nodes()
    }

    /// Whether a layer is one call of the operator, of sparse mode 9.
    pub fn is_one_call(&self) -> bool {
        self.is_one_call
    }

    /// Begins a step, as [`TreeGraphs::begin`](crate::TreeGraphs::begin) does, for sequences that end with the nodes.
    ///
    /// # Errors
    /// As for [`TreeGraphs::begin`](crate::TreeGraphs::begin).
    pub fn begin<'a>(
        &'a mut self,
        stream: &'a Stream,
        requests: &[TreeRequest<'_>],
    ) -> Result<LatentTreeGraphStep<'a, T>> {
        let step = match self.is_one_call {
            true => self.pool.begin(stream, requests, of_both),
            false => self.pool.begin(stream, requests, of_context),
        };
        Ok(LatentTreeGraphStep { step: step? })
    }
}

impl<T: Element> fmt::Debug for LatentTreeGraphs<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LatentTreeGraphs")
            .field("pool", &self.pool)
            .field("is_one_call", &self.is_one_call)
            .finish()
    }
}

/// A verification in progress. From [`LatentTreeGraphs::begin`]; drop it when the last layer is queued.
pub struct LatentTreeGraphStep<'a, T: Element> {
    step: TreePoolStep<'a, LatentBuffers<T>>,
}

impl<'a, T: Element> LatentTreeGraphStep<'a, T> {
    /// The tensors of the captured size, to be filled in place on the step's stream before
    /// [`LatentTreeGraphStep::launch`]. Rows of padding, and rows after the nodes of a tree, may hold any finite
    /// numbers.
    pub fn tensors(&self) -> &'a LatentGraphTensors<T> {
        &self.step.step.buffers().tensors
    }

    /// Launches the graph of a layer, whose tensors were filled and whose nodes are in the cache. Returns at once. The
    /// attention of all layers is one tensor, lent until the next call of this step.
    ///
    /// # Errors
    /// As for [`GraphStep::launch`](crate::GraphStep::launch).
    pub fn launch(&mut self, layer: usize) -> Result<&Tensor<T>> {
        self.step.step.launch(layer)?;
        Ok(&self.tensors().attention)
    }

    /// Copies absorbed queries and rotary parts, latents and rotary keys of the nodes of a layer
    /// ([`LayerInputs::latent`], [`LatentForm::Absorbed`]), each `[requests, heads, nodes, dim]`, into the buffers and
    /// launches its graph. They have the captured number of nodes; rows after the nodes of a tree mean nothing.
    ///
    /// # Errors
    /// As for [`TreeGraphStep::forward`](crate::TreeGraphStep::forward), with
    /// [`GRAPH_INPUTS`](crate::rules::GRAPH_INPUTS) for inputs without latents, and for queries of another form.
    pub fn forward<'i>(
        &mut self,
        layer: usize,
        inputs: impl Into<LayerInputs<'i, T>>,
    ) -> Result<&Tensor<T>> {
        let inputs = inputs.into();
        let query_rope = match &inputs.latent {
            Some(LatentTensors {
                query_rope,
                form: LatentForm::Absorbed,
            }) => *query_rope,
            other => {
                let form = other.map(|latent| latent.form);
                return Err(not_of_trees(
                    match form {
                        Some(form) => format!("queries in the form {form:?} in layer {layer}"),
                        None => format!("layer {layer} without latents"),
                    },
                    "absorbed queries, latents and rotary parts",
                    "make the inputs by `LayerInputs::latent` with `LatentForm::Absorbed`",
                )
                .into());
            }
        };
        let tensors = self.tensors();
        let copies = [
            ("query", inputs.query, &tensors.query),
            ("query_rope", query_rope, &tensors.query_rope),
            ("latent", inputs.key, &tensors.latent),
            ("key_rope", inputs.value, &tensors.key_rope),
        ];
        self.step.bring(layer, &inputs, &copies)?;
        self.launch(layer)
    }

    /// The lease that keeps blocks from being handed out while the step may read them.
    pub fn lease(&self) -> &StepLease<'a, Stream> {
        &self.step.lease
    }
}

impl<T: Element> fmt::Debug for LatentTreeGraphStep<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LatentTreeGraphStep")
            .field("step", &self.step.step)
            .finish_non_exhaustive()
    }
}
