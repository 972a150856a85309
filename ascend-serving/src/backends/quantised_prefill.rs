//! Any step over a quantised cache, dequantised to 16 bits.

use std::fmt;
use std::ops::Range;
use std::sync::Mutex;

use ascend_attention::attention::{CallLengths, Cumulative, Inputs};
use ascend_attention::spec::Layout;
use ascend_attention::{AnyTensor, Element, Output, Plan, Stream, Tensor};

use crate::causality::Causality;
use crate::error::Result;
use crate::kv::{CachedRows, QuantisedLayer};
use crate::sharing::lock;

use super::dense_rows::DenseRows;
use super::fused_attention;
use super::program::{StepProgram, StepStage};
use super::quantised_decode::single_tokens;
use super::step_context::{LayerTensors, StepContext, check_quantised_mask, quantised_cache, size};
use super::step_memory::StepMemory;

/// The keys of one request among those of the step.
#[derive(Debug)]
struct RequestKeys {
    /// The cached keys, and their rows.
    cached: CachedRows,
    cached_rows: Range<usize>,
    /// The keys of the step's own tokens, and their rows.
    own: Range<usize>,
    own_rows: Range<usize>,
}

impl RequestKeys {
    /// The requests of a step after the first `singles`, dummies included, and where the rows of each end.
    fn behind(singles: usize, step: &StepContext<'_>) -> Result<(Vec<Self>, Vec<usize>)> {
        let metadata = step.metadata;
        let causality = step.mask.causality()?;
        let (mut all, mut ends) = (Vec::new(), Vec::new());
        let (mut token, mut row) = (singles, 0usize);
        for (request, (new, cached)) in metadata.new_and_cached().enumerate().skip(singles) {
            let copied = match step.shares_keys {
                true => cached + new,
                false => cached,
            };
            let rows = metadata.cached_rows([(request, causality.shown_from(cached)..copied)])?;
            let behind = row + rows.len();
            let next = token + new;
            let own = if step.shares_keys { next..next } else { token..next };
            let end = behind + own.len();
            all.push(Self { cached: rows, cached_rows: row..behind, own, own_rows: behind..end });
            ends.push(end);
            (token, row) = (next, end);
        }
        Ok((all, ends))
    }
}

/// The number of requests at the beginning of the step that add one token to cached ones; 0 unless the layer is
/// causal and has no sinks.
fn leading_singles<T: Element>(step: &StepContext<'_>, first: &LayerTensors<'_, T>) -> Result<usize> {
    if step.mask.causality()? != Causality::Causal || first.learnable_sink.is_some() {
        return Ok(0);
    }
    let requests = step.metadata.new_and_cached();
    Ok((requests.take_while(|(new, cached)| *new == 1 && *cached > 0)).count())
}

/// The calls of a step over cached tokens, but for the requests at its beginning that add one token each.
struct DenseStep<T: Element> {
    plan: Plan,
    /// The query tokens of the other requests.
    tokens: Range<usize>,
    requests: Vec<RequestKeys>,
    rows: usize,
    /// Keys and values, used by one layer after the other.
    dense: Mutex<[DenseRows<T>; 2]>,
}

impl<T: Element> fmt::Debug for DenseStep<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DenseStep").field("plan", &self.plan).field("requests", &self.requests).finish_non_exhaustive()
    }
}

pub(super) fn program<T: Element>(step: &StepContext<'_>, first: &LayerTensors<'_, T>) -> Result<StepProgram<T>> {
    let cache = quantised_cache(first)?;
    check_quantised_mask(step)?;
    let metadata = step.metadata;
    if !metadata.state().reads_cache() {
        return fused_attention::program(step);
    }
    cache.cache.check_contiguous(metadata.settings().block_size())?;
    let singles = match leading_singles(step, first)? {
        // Steps of such requests alone are for `Backend::QuantisedDecode`; here all their tokens are copied.
        all if all == metadata.table().requests() => 0,
        some => some,
    };
    let (requests, ends) = RequestKeys::behind(singles, step)?;
    let rows = ends.last().copied().unwrap_or(0);
    let dtype = cache.stored().dtype();
    let [keys, values] = channel_scales(cache);
    let dense = [
        DenseRows::plan(step.stream.device(), rows, first.key, (dtype, keys))?,
        DenseRows::plan(step.stream.device(), rows, first.value, (dtype, values))?,
    ];
    let [key, value] = packed(&dense, rows, first)?;
    let masks = step.stream.device().masks();
    let mask = step.mask.causality()?.mask(&masks)?;
    let lengths = CallLengths::PackedDense { q: &metadata.q_ends().split_at(singles).1, kv: &Cumulative::new(ends)? };
    let call = lengths.apply(step.shape.call(Layout::Tnd).mask(mask));
    let tokens = singles..metadata.tokens();
    let query = first.query.narrow(0, tokens.clone())?;
    let plan = call.plan(first.with_sink(Inputs::new(&query, &key, &value)))?;
    let singles = (singles > 0).then(|| single_tokens(step, cache, singles));
    Ok(StepProgram::new(singles).stage(DenseStep { plan, tokens, requests, rows, dense: Mutex::new(dense) }))
}

/// The scales of keys and of values, where channels have them.
fn channel_scales(cache: &QuantisedLayer) -> [Option<&AnyTensor>; 2] {
    match cache.of_channels() {
        Some(scales) => scales.map(Some),
        None => [None; 2],
    }
}

fn packed<T: Element>(
    [keys, values]: &[DenseRows<T>; 2],
    rows: usize,
    layer: &LayerTensors<'_, T>,
) -> Result<[Tensor<T>; 2]> {
    Ok([keys.packed(rows, layer.key)?, values.packed(rows, layer.value)?])
}

impl<T: Element> DenseStep<T> {
    /// Queues the copies that gather the keys and values of all requests.
    fn gather_keys_and_values(
        &self,
        stream: &Stream,
        dense: &[DenseRows<T>; 2],
        cache: &QuantisedLayer,
        layer: &LayerTensors<'_, T>,
    ) -> Result<()> {
        let [keys, values] = dense;
        for request in self.requests.iter().filter(|request| !request.cached.is_empty()) {
            let place = |rows: &Tensor<i8>| rows.narrow(0, request.cached_rows.clone());
            let (key, value) = (place(&keys.quantised)?, place(&values.quantised)?);
            cache.cache.gather(stream, &request.cached, &key, &value)?;
            if let Some(scales) = cache.of_tokens() {
                let place = |rows: &Tensor<f32>| rows.narrow(0, request.cached_rows.clone());
                let (key, value) = (place(&keys.scales)?, place(&values.scales)?);
                let rows = &scales.rows;
                rows.gather(stream, &request.cached, &key, &value)?;
            }
        }
        let [of_keys, of_values] = channel_scales(cache);
        keys.dequantise(stream, of_keys)?;
        values.dequantise(stream, of_values)?;
        for request in self.requests.iter().filter(|request| !request.own.is_empty()) {
            for (rows, own) in [(keys, layer.key), (values, layer.value)] {
                let hidden = size(&rows.dequantised, 1);
                let own = own.narrow(0, request.own.clone())?;
                let own = own.reshape([request.own.len(), hidden])?;
                let place = rows.dequantised.narrow(0, request.own_rows.clone())?;
                place.copy_from(stream, &own)?;
            }
        }
        Ok(())
    }
}

impl<T: Element> StepStage<T> for DenseStep<T> {
    fn memory(&self) -> StepMemory {
        let dense = lock(&self.dense);
        let of_dense = dense.iter().map(DenseRows::workspace_bytes);
        StepMemory::of_calls(of_dense.chain([self.plan.workspace_bytes()])).holding(dense.iter().map(DenseRows::bytes))
    }

    fn reads_own_keys(&self) -> bool {
        self.requests.iter().any(|request| !request.own.is_empty())
    }

    fn launch_into(&self, stream: &Stream, layer: &LayerTensors<'_, T>, output: &mut Tensor<T>) -> Result<()> {
        let cache = quantised_cache(layer)?;
        // The lock is held until all is queued: the copies and calls of two layers must not mix.
        let dense = lock(&self.dense);
        self.gather_keys_and_values(stream, &dense, cache, layer)?;
        let [key, value] = packed(&dense, self.rows, layer)?;
        let query = layer.query.narrow(0, self.tokens.clone())?;
        let inputs = layer.with_sink(Inputs::new(&query, &key, &value));
        let mut output = Output::from(output.narrow(0, self.tokens.clone())?);
        Ok(self.plan.launch_into(stream, inputs, &mut output)?)
    }
}
