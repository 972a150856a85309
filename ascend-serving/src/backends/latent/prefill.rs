//! Plain queries in multi-head latent attention: the step's own tokens, then the cached ones in chunks.

use std::fmt;
use std::ops::Range;
use std::sync::Mutex;

use ascend_attention::attention::{CallLengths, Inputs, PerRequest};
use ascend_attention::merge::{MergePlan, MergeState, Part};
use ascend_attention::spec::Layout;
use ascend_attention::{CausalOrigin, Device, Element, FusedInferAttention, Mask, Output, Plan, Stream, Tensor};

use crate::backends::{
    LatentForm, LatentRows, LayerTensors, StepContext, StepMemory, StepStage, UpProjected, UpProjection, output_bytes,
    size, tensor_bytes,
};
use crate::batch::StepPart;
use crate::error::{Error, Result};
use crate::kv::QuantisedLayer;
use crate::sharing::lock;

use super::cached_latents::{CachedLatents, LatentSpace};
use super::context_chunks::{ContextChunk, ContextChunks};
use super::refusals::latent_inputs;

/// The calls of plain queries.
///
/// Queries of requests with cached tokens are put in the order of the chunks, so that the queries of a chunk are
/// contiguous. With one such request, or where they are in that order already, nothing is copied.
pub(super) struct MlaPrefill<T: Element> {
    /// Shape of queries and output, `[tokens, N, D]`.
    shape: [usize; 3],
    /// The tokens of this part among those of the step.
    of_step: Range<usize>,
    own: Plan,
    chunks: Vec<Chunk>,
    /// The requests' rows in this part of the step, in the order of the chunks.
    rows: Vec<Range<usize>>,
    sizes: WorkspaceSizes,
    memory: StepMemory,
    /// Workspaces that no layer uses now. A layer that runs while another one does, on another thread or from within
    /// the projection, takes a workspace of its own, so that no layer waits for a caller's code.
    free: Mutex<Vec<Workspace<T>>>,
}

/// Numbers of rows and widths in a workspace.
struct WorkspaceSizes {
    /// Rows of the step's own tokens.
    tokens: usize,
    /// Rows of requests with cached tokens.
    rows_with_context: usize,
    /// Tokens of the longest chunk, where there are chunks.
    longest: Option<usize>,
    /// A layer of the cache where it is quantised.
    quantised: Option<QuantisedLayer>,
    /// Whether chunks take the queries in the order of the step.
    in_place: bool,
    heads: usize,
    dim: usize,
    latent_dim: usize,
    rope_dim: usize,
}

impl WorkspaceSizes {
    fn allocate<T: Element>(&self, device: &Device) -> Result<Workspace<T>> {
        let context = self.longest.map(|longest| self.context(device, longest)).transpose()?;
        Ok(Workspace { projected: self.projected(device)?, context })
    }

    /// Memory for the keys and values of the step's own tokens, or of a chunk.
    fn projected<T: Element>(&self, device: &Device) -> Result<UpProjected<T>> {
        let rows = self.tokens.max(self.longest.unwrap_or(0));
        let empty = |dim: usize| Tensor::empty(device, [rows, self.heads, dim]);
        Ok(UpProjected { key: empty(self.dim)?, key_rope: empty(self.rope_dim)?, value: empty(self.dim)? })
    }

    /// Memory for chunks of up to `longest` tokens.
    fn context<T: Element>(&self, device: &Device, longest: usize) -> Result<ContextSpace<T>> {
        let (rows_with_context, heads) = (self.rows_with_context, self.heads);
        let empty = |rows: usize, dim: usize| Tensor::<T>::empty(device, [rows, heads, dim]);
        let lse = |rows: usize| Tensor::<f32>::empty(device, [rows, heads, 1]);
        let output = || -> Result<Output<T>> {
            Ok(Output { attention: empty(rows_with_context, self.dim)?, softmax_lse: Some(lse(rows_with_context)?) })
        };
        Ok(ContextSpace {
            cached: LatentSpace::new(device, longest, [self.latent_dim, self.rope_dim], self.quantised.as_ref())?,
            own_lse: lse(self.tokens)?,
            part: output()?,
            merged: [output()?, output()?],
            ordered: match self.in_place {
                true => None,
                false => Some([empty(rows_with_context, self.dim)?, empty(rows_with_context, self.rope_dim)?]),
            },
        })
    }
}

/// Memory that is used again for each chunk and each layer, so that a layer allocates nothing on the device.
struct Workspace<T: Element> {
    projected: UpProjected<T>,
    /// Memory for the chunks, where there are any.
    context: Option<ContextSpace<T>>,
}

impl<T: Element> Workspace<T> {
    /// Bytes of device memory.
    fn bytes(&self) -> usize {
        let UpProjected { key, key_rope, value } = &self.projected;
        let projected = [key, key_rope, value].map(tensor_bytes);
        let context = self.context.as_ref().map_or(0, ContextSpace::bytes);
        projected.into_iter().fold(context, usize::saturating_add)
    }
}

/// Memory in which the chunks are computed. Its rows are in the order of the chunks.
struct ContextSpace<T: Element> {
    cached: LatentSpace<T>,
    /// Log-sum-exps of the step's own tokens, in the order of the step.
    own_lse: Tensor<f32>,
    /// The attention over one chunk.
    part: Output<T>,
    /// The attention over all keys up to one chunk, and up to the next; the two outputs take turns.
    merged: [Output<T>; 2],
    /// Queries and their rotary parts in the order of the chunks, where that is not the order of the step.
    ordered: Option<[Tensor<T>; 2]>,
}

impl<T: Element> ContextSpace<T> {
    fn bytes(&self) -> usize {
        let ordered = self.ordered.iter().flatten();
        let outputs = self.merged.iter().chain([&self.part]);
        let held = ordered.map(tensor_bytes).chain(outputs.map(output_bytes)).chain([self.cached.bytes()]);
        held.fold(tensor_bytes(&self.own_lse), usize::saturating_add)
    }
}

/// A chunk of the cached tokens, and the call of the first requests' queries over it.
struct Chunk {
    requests: usize,
    rows: usize,
    cached: CachedLatents,
    plan: Plan,
    merge: MergePlan,
}

impl<T: Element> MlaPrefill<T> {
    /// Prepares the calls of a part of the step. `first.query` has the queries of this part, `query_rope` the rotary
    /// parts of all tokens.
    pub(super) fn plan(
        step: &StepContext<'_>,
        part: StepPart,
        first: &LayerTensors<'_, T>,
        query_rope: &Tensor<T>,
        workspace_bytes: usize,
    ) -> Result<Self> {
        let query_rope = query_rope.narrow(0, part.tokens.clone())?;
        let (heads, dim) = (step.shape.heads, size(first.query, 2));
        let [latent_dim, rope_dim] = [size(first.key, 2), size(&query_rope, 2)];
        let head = dim * 2 + rope_dim;
        let row = latent_dim + rope_dim;
        let row = row + heads * head;
        // Latents of one byte are dequantised by a call whose queries are zeros.
        let stored = first.quantised.map_or(0, |_| latent_dim * (1 + size_of::<T>()));
        let row_bytes = (row * size_of::<T>() + stored).max(1);
        let capacity = workspace_bytes.checked_div(row_bytes).unwrap_or(0);
        let block_size = step.metadata.settings().block_size;
        let context = ContextChunks::new(&part.cached(), capacity, block_size)?;
        let tokens = part.tokens.len();

        let device = step.stream.device();
        let rows = part.rows(&context.order);
        let rows_with_context: usize = rows.iter().map(Range::len).sum();
        let sizes = WorkspaceSizes {
            tokens,
            rows_with_context,
            longest: context.longest(),
            quantised: first.quantised.cloned(),
            in_place: context.in_place(),
            heads,
            dim,
            latent_dim,
            rope_dim,
        };
        let projected = sizes.projected(device)?;
        // Chunks come with their memory: none of them is left out of the plans.
        let chunked = match sizes.longest {
            Some(longest) => Some((&context.chunks, sizes.context(device, longest)?)),
            None => None,
        };

        let call = step.shape.call(Layout::Tnd).kv_heads(heads);
        let lengths = CallLengths::PackedDense { q: &part.q_ends, kv: &part.q_ends };
        let own = lengths
            .apply(call.clone())
            .mask(device.masks().causal(CausalOrigin::RightDown)?)
            .softmax_lse(chunked.is_some());
        let of_step = projected.first(tokens)?;
        let own = own.plan(inputs(first.query, &query_rope, &of_step))?;
        let planned = |chunk: &ContextChunk, space: &ContextSpace<T>| -> Result<Chunk> {
            let lengths = ChunkLengths::new(chunk, &rows)?;
            let rows: usize = lengths.rows;
            let projected = projected.first(chunk.tokens())?;
            let queries = [first.query.narrow(0, 0..rows)?, query_rope.narrow(0, 0..rows)?];
            let [query, query_rope] = &queries;
            let call = call.clone().mask(Mask::none()).softmax_lse(true);
            let plan = lengths.apply(call)?;
            let plan = plan.plan(inputs(query, query_rope, &projected))?;
            let over = first_rows(&space.part, rows)?;
            let parts = [Part::of(&over)?, Part::of(&over)?];
            Ok(Chunk {
                requests: chunk.positions.len(),
                rows,
                cached: CachedLatents::plan(step, first, chunk_tokens(&part, &context.order, chunk))?,
                plan,
                // Each row has keys among its own step's, and in each chunk that it is part of.
                merge: MergeState::new(Layout::Tnd).plan(&parts)?,
            })
        };
        let (chunks, context) = match chunked {
            Some((chunks, space)) => {
                let chunks = chunks.iter().map(|chunk| planned(chunk, &space)).collect::<Result<Vec<_>>>()?;
                (chunks, Some(space))
            }
            None => (Vec::new(), None),
        };
        let workspace = Workspace { projected, context };
        let calls = chunks.iter().map(|chunk: &Chunk| {
            let workspace_bytes = chunk.plan.workspace_bytes();
            workspace_bytes.max(chunk.merge.workspace_bytes()).max(chunk.cached.workspace_bytes())
        });
        let dequantised = workspace.context.iter().map(|context| context.cached.workspace_bytes());
        let calls = StepMemory::of_calls(calls.chain([own.workspace_bytes()]).chain(dequantised));
        Ok(Self {
            memory: calls.holding([workspace.bytes()]),
            shape: [tokens, heads, dim],
            of_step: part.tokens,
            own,
            chunks,
            rows,
            sizes,
            free: Mutex::new(vec![workspace]),
        })
    }

    /// Merges the attention over each chunk into that over the step's own tokens.
    fn merge_context(
        &self,
        stream: &Stream,
        layer: &LayerTensors<'_, T>,
        (query_rope, projection): (&Tensor<T>, &dyn UpProjection<T>),
        workspace: (&UpProjected<T>, &ContextSpace<T>),
        own: &Output<T>,
    ) -> Result<()> {
        let (projected, space) = workspace;
        let of_step = [layer.query, query_rope];
        let ([query, query_rope], mut merged) = match &space.ordered {
            None => (of_step, own.clone()),
            Some([query, query_rope]) => {
                self.order(stream, of_step, own, space)?;
                // The first merge writes the other output.
                ([query, query_rope], space.merged[1].clone())
            }
        };
        let mut requests = self.rows.len();
        for (chunk, target) in self.chunks.iter().zip(space.merged.iter().cycle()) {
            // Requests without a part of the chunk are done.
            self.copy_back(stream, &merged, own, chunk.requests..requests)?;
            requests = chunk.requests;
            merged = first_rows(&merged, chunk.rows)?;
            let tokens = chunk.cached.len();
            let [latent, key_rope] = &space.cached.fill(stream, &chunk.cached, layer)?;
            let cached = LatentRows { latent, key_rope };
            let projected = projected.first(tokens)?;
            projection.up_project(stream, layer.layer, cached, &projected)?;
            let queries = [query.narrow(0, 0..chunk.rows)?, query_rope.narrow(0, 0..chunk.rows)?];
            let [query, query_rope] = &queries;
            let inputs = inputs(query, query_rope, &projected);
            let mut part = first_rows(&space.part, chunk.rows)?;
            chunk.plan.launch_into(stream, inputs, &mut part)?;
            let mut target = first_rows(target, chunk.rows)?;
            let parts = [Part::of(&merged)?, Part::of(&part)?];
            chunk.merge.launch_into(stream, &parts, &mut target)?;
            merged = target;
        }
        self.copy_back(stream, &merged, own, 0..requests)
    }

    /// Copies the rows of requests with cached tokens to the order of the chunks.
    fn order(
        &self,
        stream: &Stream,
        [query, query_rope]: [&Tensor<T>; 2],
        own: &Output<T>,
        space: &ContextSpace<T>,
    ) -> Result<()> {
        let Some([to_query, to_rope]) = &space.ordered else {
            return Ok(());
        };
        let [_, merged] = &space.merged;
        let mut at = 0;
        for rows in &self.rows {
            let place = at..rows.len() + at;
            at = place.end;
            for (to, from) in [(to_query, query), (to_rope, query_rope), (&merged.attention, &own.attention)] {
                let from = from.narrow(0, rows.clone())?;
                to.narrow(0, place.clone())?.copy_from(stream, &from)?;
            }
            if let (Some(to), Some(from)) = (&merged.softmax_lse, &own.softmax_lse) {
                let from = from.narrow(0, rows.clone())?;
                to.narrow(0, place)?.copy_from(stream, &from)?;
            }
        }
        Ok(())
    }

    /// Copies the merged rows of some requests back to their rows in the step's output.
    fn copy_back(&self, stream: &Stream, merged: &Output<T>, own: &Output<T>, requests: Range<usize>) -> Result<()> {
        let before = self.rows.iter().take(requests.start).map(Range::len);
        let mut at: usize = before.sum();
        for rows in self.rows.get(requests).unwrap_or(&[]) {
            let place = at..rows.len() + at;
            at = place.end;
            let from = merged.attention.narrow(0, place)?;
            let to = own.attention.narrow(0, rows.clone())?;
            to.copy_from(stream, &from)?;
        }
        Ok(())
    }

    fn launch_in(
        &self,
        workspace: &Workspace<T>,
        stream: &Stream,
        layer: &LayerTensors<'_, T>,
        (query_rope, projection): (&Tensor<T>, &dyn UpProjection<T>),
        into: &Tensor<T>,
    ) -> Result<()> {
        let query_rope = &query_rope.narrow(0, self.of_step.clone())?;
        let (latent_dim, rope_dim) = (size(layer.key, 2), size(layer.value, 2));
        let [tokens, ..] = self.shape;
        let new = |rows: &Tensor<T>| rows.narrow(0, self.of_step.clone());
        let new = LatentRows {
            latent: &new(layer.key)?.reshape([tokens, latent_dim])?,
            key_rope: &new(layer.value)?.reshape([tokens, rope_dim])?,
        };
        let projected = workspace.projected.first(tokens)?;
        projection.up_project(stream, layer.layer, new, &projected)?;
        let inputs = inputs(layer.query, query_rope, &projected);
        let context = workspace.context.as_ref();
        let mut own = Output { attention: into.clone(), softmax_lse: context.map(|context| context.own_lse.clone()) };
        self.own.launch_into(stream, inputs, &mut own)?;
        if let Some(context) = context {
            let workspace = (&workspace.projected, context);
            self.merge_context(stream, layer, (query_rope, projection), workspace, &own)?;
        }
        Ok(())
    }
}

impl<T: Element> StepStage<T> for MlaPrefill<T> {
    fn memory(&self) -> StepMemory {
        self.memory
    }

    fn launch_into(&self, stream: &Stream, layer: &LayerTensors<'_, T>, output: &mut Tensor<T>) -> Result<()> {
        let latent = latent_inputs(layer)?;
        let (LatentForm::Plain(projection)
        | LatentForm::Mixed { projection, .. }
        | LatentForm::QuantisedMixed { projection, .. }) = latent.form
        else {
            return Err(Error::not_as_planned("form", format_args!("{:?}", latent.form), "plain queries"));
        };
        let free = lock(&self.free).pop();
        let workspace = match free {
            Some(workspace) => workspace,
            None => self.sizes.allocate(stream.device())?,
        };
        let plain = (latent.query_rope, projection);
        let outcome = self.launch_in(&workspace, stream, layer, plain, output);
        lock(&self.free).push(workspace);
        outcome
    }
}

fn inputs<'a, T: Element>(
    query: &'a Tensor<T>,
    query_rope: &'a Tensor<T>,
    projected: &'a UpProjected<T>,
) -> Inputs<'a, T> {
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

/// The requests of a step with tokens in a chunk, and the positions of these.
fn chunk_tokens(
    part: &StepPart,
    order: &[usize],
    chunk: &ContextChunk,
) -> impl Iterator<Item = (usize, Range<usize>)> + Clone {
    let first = part.requests.start;
    let of_step = order.iter().map(move |request| first + *request);
    of_step.zip(chunk.positions.iter().cloned())
}

/// The lengths of a chunk's call.
struct ChunkLengths {
    rows: usize,
    q: PerRequest,
    kv: PerRequest,
}

impl ChunkLengths {
    fn new(chunk: &ContextChunk, rows: &[Range<usize>]) -> Result<Self> {
        let query_rows = rows.iter().take(chunk.positions.len()).map(Range::len);
        Ok(Self {
            rows: query_rows.clone().sum(),
            q: PerRequest::new(query_rows.collect())?,
            kv: PerRequest::new(chunk.positions.iter().map(ExactSizeIterator::len).collect())?,
        })
    }

    fn apply(&self, call: FusedInferAttention) -> Result<FusedInferAttention> {
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
