//! Steps of plain queries in multi-head latent attention: the step's own tokens, then the cached ones in chunks.

use std::fmt;
use std::ops::Range;
use std::sync::Mutex;

use ascend_spec::Layout;

use crate::attention::{Inputs, Output, Plan};
use crate::error::{Error, Result};
use crate::kv::{CachedRows, PageTable};
use crate::mask::{CausalOrigin, Mask};
use crate::memory::Element;
use crate::merge::{MergePlan, MergeState, Part};
use crate::runtime::{Stream, lock};
use crate::tensor::Tensor;

use super::AttentionMetadata;
use super::backend::{LayerTensors, StepContext, StepPlan, count};
use super::context_chunks::{ContextChunk, ContextChunks};
use super::latent::{LatentRows, LatentTensors, UpProjected};
use super::lengths::{CallLengths, PerRequest};
use super::mla::{plain, size};

/// A step of plain queries.
///
/// Queries of requests that have something cached are put in the order of the chunks, so that those which a chunk is for
/// lie one behind the other; with one such request, or an order that is already so, nothing is copied.
pub(super) struct MlaPrefill<T: Element> {
    /// The stream that orders the use of the workspace.
    stream: usize,
    tokens: usize,
    own: Plan,
    chunks: Vec<Chunk>,
    /// The requests' rows in the step, in the order of the chunks.
    rows: Vec<Range<usize>>,
    /// Its lock makes a layer's launches follow each other.
    workspace: Mutex<Workspace<T>>,
}

/// What is used again for each chunk and each layer.
struct Workspace<T: Element> {
    latent: Tensor<T>,
    key_rope: Tensor<T>,
    projected: UpProjected<T>,
    /// Where the order of the chunks is not that of the step.
    ordered: Option<Ordered<T>>,
}

/// Rows in the order of the chunks.
struct Ordered<T: Element> {
    query: Tensor<T>,
    query_rope: Tensor<T>,
    attention: Tensor<T>,
    softmax_lse: Tensor<f32>,
}

/// Part of the cached tokens: the queries of the first requests over it.
struct Chunk {
    requests: usize,
    rows: usize,
    cached: CachedRows,
    plan: Plan,
    merge: MergePlan,
}

impl<T: Element> MlaPrefill<T> {
    pub(super) fn plan(
        step: &StepContext<'_>,
        first: &LayerTensors<'_, T>,
        latent: &LatentTensors<'_, T>,
        workspace_bytes: usize,
    ) -> Result<Self> {
        let metadata = step.metadata;
        let (heads, dim) = (step.shape.heads, size(first.query, 2));
        let [latent_dim, rope_dim] = [size(first.key, 2), size(latent.query_rope, 2)];
        let head = dim.saturating_mul(2).saturating_add(rope_dim);
        let row = latent_dim.saturating_add(rope_dim);
        let row = row.saturating_add(heads.saturating_mul(head));
        let capacity = workspace_bytes / row.saturating_mul(size_of::<T>()).max(1);
        let (cached, block_size) = (cached(metadata), metadata.settings().block_size);
        let context = ContextChunks::new(&cached, capacity, block_size)?;
        let tokens = metadata.tokens() as usize;

        let device = step.stream.device();
        let longest = context.longest();
        let (all, gathered) = (tokens.max(longest), longest.max(1));
        let empty = |shape: &[usize]| Tensor::<T>::empty(device, shape);
        let rows = rows(metadata, &context.order);
        let behind: usize = rows.iter().map(Range::len).sum();
        let ordered = match context.in_place() {
            true => None,
            false => Some(Ordered {
                query: empty(&[behind, heads, dim])?,
                query_rope: empty(&[behind, heads, rope_dim])?,
                attention: empty(&[behind, heads, dim])?,
                softmax_lse: Tensor::empty(device, [behind, heads, 1])?,
            }),
        };
        let workspace = Workspace {
            latent: empty(&[gathered, latent_dim])?,
            key_rope: empty(&[gathered, rope_dim])?,
            projected: UpProjected {
                key: empty(&[all, heads, dim])?,
                key_rope: empty(&[all, heads, rope_dim])?,
                value: empty(&[all, heads, dim])?,
            },
            ordered,
        };

        let call = step.shape.call(Layout::Tnd).kv_heads(count(heads));
        let lengths = CallLengths::PackedDense {
            q: metadata.q_ends(),
            kv: metadata.q_ends(),
        };
        let merged = !context.chunks.is_empty();
        if merged {
            first.cache.lies_whole(block_size)?;
        }
        let own = lengths
            .apply(call.clone())
            .mask(device.masks().causal(CausalOrigin::RightDown)?)
            .softmax_lse(merged);
        let projected = workspace.projected.first(tokens)?;
        let own = own.plan_with(&inputs(first.query, latent.query_rope, &projected))?;
        let mut chunks = Vec::with_capacity(context.chunks.len());
        if merged {
            let output: Output<T> = own.output()?;
            for chunk in &context.chunks {
                let lengths = ChunkLengths::new(chunk, &rows)?;
                let rows: usize = lengths.rows;
                let projected = workspace.projected.first(chunk.tokens())?;
                let queries = [
                    first.query.narrow(0, 0..rows)?,
                    latent.query_rope.narrow(0, 0..rows)?,
                ];
                let [query, query_rope] = &queries;
                let call = call.clone().mask(Mask::none()).softmax_lse(true);
                let plan = lengths.apply(call)?;
                let plan = plan.plan_with(&inputs(query, query_rope, &projected))?;
                let part = first_rows(&output, rows)?;
                let parts = [Part::of(&part)?, Part::of(&part)?];
                chunks.push(Chunk {
                    requests: chunk.positions.len(),
                    rows,
                    cached: cached_rows(metadata.table(), block_size, &context.order, chunk)?,
                    plan,
                    // Each row has keys in its own step, and in each chunk that it is part of.
                    merge: MergeState::new(Layout::Tnd).plan(&parts)?,
                });
            }
        }
        Ok(Self {
            stream: step.stream.as_raw().addr(),
            tokens,
            own,
            chunks,
            rows,
            workspace: Mutex::new(workspace),
        })
    }

    /// Merges the attention over each chunk into that over the step's own tokens.
    fn merge_context(
        &self,
        step: &StepContext<'_>,
        layer: &LayerTensors<'_, T>,
        workspace: &Workspace<T>,
        own: Output<T>,
    ) -> Result<Tensor<T>> {
        let stream = step.stream;
        let (latent, projection) = plain(step, layer)?;
        let of_step = [layer.query.clone(), latent.query_rope.clone()];
        let ([query, query_rope], mut merged) = match &workspace.ordered {
            None => (of_step, own.clone()),
            Some(to) => self.order(stream, &of_step, &own, to)?,
        };
        let mut requests = self.rows.len();
        for chunk in &self.chunks {
            // Requests without a part of the chunk are done.
            self.give_back(stream, &merged, &own, chunk.requests..requests)?;
            requests = chunk.requests;
            merged = first_rows(&merged, chunk.rows)?;
            let tokens = chunk.cached.len();
            let cached = LatentRows {
                latent: &workspace.latent.narrow(0, 0..tokens)?,
                key_rope: &workspace.key_rope.narrow(0, 0..tokens)?,
            };
            layer
                .cache
                .gather(stream, &chunk.cached, cached.latent, cached.key_rope)?;
            let projected = workspace.projected.first(tokens)?;
            projection.up_project(stream, layer.layer, cached, &projected)?;
            let queries = [
                query.narrow(0, 0..chunk.rows)?,
                query_rope.narrow(0, 0..chunk.rows)?,
            ];
            let [query, query_rope] = &queries;
            let inputs = inputs(query, query_rope, &projected);
            let part: Output<T> = chunk.plan.launch_with(stream, &inputs)?;
            let parts = [Part::of(&merged)?, Part::of(&part)?];
            merged = chunk.merge.launch(stream, &parts)?;
        }
        let whole = workspace.ordered.is_none() && size(&merged.attention, 0) == self.tokens;
        if whole {
            return Ok(merged.attention);
        }
        self.give_back(stream, &merged, &own, 0..requests)?;
        Ok(own.attention)
    }

    /// Copies the rows of requests with cached tokens to the order of the chunks.
    fn order(
        &self,
        stream: &Stream,
        [query, query_rope]: &[Tensor<T>; 2],
        own: &Output<T>,
        to: &Ordered<T>,
    ) -> Result<([Tensor<T>; 2], Output<T>)> {
        let mut at = 0;
        for rows in &self.rows {
            let place = at..at + rows.len();
            at = place.end;
            for (to, from) in [
                (&to.query, query),
                (&to.query_rope, query_rope),
                (&to.attention, &own.attention),
            ] {
                let from = from.narrow(0, rows.clone())?;
                to.narrow(0, place.clone())?.copy_from(stream, &from)?;
            }
            if let Some(from) = &own.softmax_lse {
                let from = from.narrow(0, rows.clone())?;
                to.softmax_lse.narrow(0, place)?.copy_from(stream, &from)?;
            }
        }
        let merged = Output {
            attention: to.attention.clone(),
            softmax_lse: Some(to.softmax_lse.clone()),
        };
        Ok(([to.query.clone(), to.query_rope.clone()], merged))
    }

    /// Copies the merged rows of some requests to where the step has them.
    fn give_back(
        &self,
        stream: &Stream,
        merged: &Output<T>,
        own: &Output<T>,
        requests: Range<usize>,
    ) -> Result<()> {
        let before = self.rows.iter().take(requests.start).map(Range::len);
        let mut at = before.sum();
        for rows in self.rows.get(requests).unwrap_or(&[]) {
            let from = merged.attention.narrow(0, at..at + rows.len())?;
            at += rows.len();
            let to = own.attention.narrow(0, rows.clone())?;
            to.copy_from(stream, &from)?;
        }
        Ok(())
    }
}

impl<T: Element> StepPlan<T> for MlaPrefill<T> {
    fn run(&self, step: &StepContext<'_>, layer: &LayerTensors<'_, T>) -> Result<Output<T>> {
        let stream = step.stream;
        if stream.as_raw().addr() != self.stream {
            return Err(Error::NotAsPlanned {
                argument: "stream",
                given: "another stream".to_owned(),
                planned: "the stream of the step, which orders the use of its workspace".to_owned(),
            });
        }
        let (latent, projection) = plain(step, layer)?;
        let (latent_dim, rope_dim) = (size(layer.key, 2), size(layer.value, 2));
        let new = LatentRows {
            latent: &layer.key.reshape([self.tokens, latent_dim])?,
            key_rope: &layer.value.reshape([self.tokens, rope_dim])?,
        };
        let workspace = lock(&self.workspace);
        let projected = workspace.projected.first(self.tokens)?;
        projection.up_project(stream, layer.layer, new, &projected)?;
        let inputs = inputs(layer.query, latent.query_rope, &projected);
        let own: Output<T> = self.own.launch_with(stream, &inputs)?;
        let attention = match self.chunks.is_empty() {
            true => own.attention,
            false => self.merge_context(step, layer, &workspace, own)?,
        };
        Ok(Output {
            attention,
            softmax_lse: None,
        })
    }
}

fn inputs<'a, T: Element>(
    query: &'a Tensor<T>,
    query_rope: &'a Tensor<T>,
    projected: &'a UpProjected<T>,
) -> Inputs<'a> {
    Inputs::new(query, &projected.key, &projected.value).rope(query_rope, &projected.key_rope)
}

/// The first rows of a packed output.
fn first_rows<T: Element>(output: &Output<T>, rows: usize) -> Result<Output<T>> {
    let lse = output.softmax_lse.as_ref();
    Ok(Output {
        attention: output.attention.narrow(0, 0..rows)?,
        softmax_lse: lse.map(|lse| lse.narrow(0, 0..rows)).transpose()?,
    })
}

/// Tokens that each request had cached before the step; dummies none.
fn cached(metadata: &AttentionMetadata) -> Vec<u32> {
    let new = metadata.q_ends().per_request();
    let lengths = metadata.kv_lengths().lengths().iter().zip(new.lengths());
    let cached = lengths.map(|(kv, q)| u32::try_from(kv - q).unwrap_or(0));
    cached.collect()
}

/// The rows of these requests among the packed ones.
fn rows(metadata: &AttentionMetadata, requests: &[usize]) -> Vec<Range<usize>> {
    let starts = metadata.q_ends().with_zero();
    let at = |at: usize| {
        let row = starts.get(at).copied().unwrap_or(0);
        usize::try_from(row).unwrap_or(0)
    };
    requests.iter().map(|r| at(*r)..at(*r + 1)).collect()
}

/// The tokens of a chunk in the cache.
fn cached_rows(
    table: &PageTable,
    block_size: u32,
    order: &[usize],
    chunk: &ContextChunk,
) -> Result<CachedRows> {
    let mut rows = CachedRows::new(block_size);
    for (request, positions) in order.iter().zip(&chunk.positions) {
        rows.push(table.row(*request).unwrap_or(&[]), positions.clone())?;
    }
    Ok(rows)
}

/// The lengths of a chunk's call.
struct ChunkLengths {
    rows: usize,
    q: PerRequest,
    kv: PerRequest,
}

impl ChunkLengths {
    fn new(chunk: &ContextChunk, rows: &[Range<usize>]) -> Result<Self> {
        let of = rows.iter().take(chunk.positions.len()).map(Range::len);
        Ok(Self {
            rows: of.clone().sum(),
            q: PerRequest::new(of.map(count).collect())?,
            kv: PerRequest::new(chunk.positions.iter().map(|p| count(p.len())).collect())?,
        })
    }

    fn apply(
        &self,
        call: crate::attention::FusedInferAttention,
    ) -> Result<crate::attention::FusedInferAttention> {
        let (q, kv) = (self.q.cumulative()?, self.kv.cumulative()?);
        Ok(CallLengths::PackedDense { q: &q, kv: &kv }.apply(call))
    }
}

impl<T: Element> fmt::Debug for MlaPrefill<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let chunks = self.chunks.iter().map(|chunk| chunk.cached.len());
        f.debug_struct("MlaPrefill")
            .field("own", &self.own)
            .field("chunks", &chunks.collect::<Vec<_>>())
            .finish_non_exhaustive()
    }
}
