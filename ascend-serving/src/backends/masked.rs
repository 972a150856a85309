//! Attention of steps whose mask is a rule of the caller.

use std::fmt;
use std::ops::Range;

use ascend_attention::attention::{BlockTable, CallLengths, PerRequest};
use ascend_attention::spec::Layout;
use ascend_attention::{Element, Plan, Tensor, Violation};

use crate::batch::{AttentionMetadata, MaskKind, MaskedRequest};
use crate::error::Result;
use crate::rules;

use super::backend::{
    AttentionBackend, LayerTensors, StepContext, StepPlan, attention_alone, batched,
    launch_into_empty,
};
use super::step_memory::StepMemory;

/// Steps of every kind under a [`NamedMask`](crate::NamedMask): one call over the paged cache (BSH, sparse mode 1
/// with the whole mask) for each run of neighbouring requests with equally many new tokens, since packed calls take
/// no mask but the operator's own.
///
/// A mask has a byte for each new token and each key slot of the request's row of the block table: use it for short
/// prompts, drafts and decoding. Steps with a mask of the operator's own are refused, so that the ordinary backends
/// serve them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Masked;

impl Masked {
    pub(super) const NAME: &'static str = "masked";
}

/// The call of neighbouring requests with equally many new tokens.
struct Call {
    plan: Plan,
    requests: usize,
    /// Their query tokens.
    tokens: Range<usize>,
    block_table: BlockTable,
    mask_bytes: usize,
}

/// The calls of a step.
struct Calls(Vec<Call>);

impl fmt::Debug for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tokens = self.0.iter().map(|call| &call.tokens);
        f.debug_list().entries(tokens).finish()
    }
}

/// The requests of a step, dummies included, divided where the number of new tokens changes.
fn neighbours(metadata: &AttentionMetadata) -> Vec<Vec<MaskedRequest>> {
    let mut all: Vec<Vec<MaskedRequest>> = Vec::new();
    for request in metadata.masked_requests() {
        let new = request.new;
        match all.last_mut() {
            Some(last) if last.last().is_some_and(|last| last.new == new) => last.push(request),
            _ => all.push(vec![request]),
        }
    }
    all
}

impl<T: Element> AttentionBackend<T> for Masked {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn plan(
        &self,
        step: &StepContext<'_>,
        first: &LayerTensors<'_, T>,
    ) -> Result<Box<dyn StepPlan<T>>> {
        first.without_latent()?;
        let MaskKind::Named(mask) = step.mask else {
            return Err(Violation::new(
                &rules::BACKEND_MASK,
                format_args!("{:?}", step.mask),
                "a named mask",
                "register a backend for the operator's own masks behind this one",
            )
            .into());
        };
        let metadata = step.metadata;
        let block_size = metadata.settings().block_size();
        let columns = metadata.table().columns().saturating_mul(block_size);
        let (mut request, mut token) = (0usize, 0usize);
        let mut calls = Vec::new();
        for of in neighbours(metadata) {
            let requests = request..request.saturating_add(of.len());
            let new = of.first().map_or(0, |request| request.new);
            let tokens = token..token.saturating_add(new.saturating_mul(of.len()));
            (request, token) = (requests.end, tokens.end);
            let block_table = step.block_table.rows(requests.clone())?;
            let lengths = of.iter().map(|of| of.cached.saturating_add(of.new));
            let lengths = PerRequest::new(lengths.collect())?;
            let lengths = CallLengths::Batched {
                q: None,
                kv: &lengths,
            };
            let mask = mask.of(step.stream.device(), &of, columns)?;
            let mask_bytes = mask.tensor_bytes();
            let call = step.shape.call(Layout::Bsh).mask(mask);
            let query = batched(&first.query.narrow(0, tokens.clone())?, of.len())?;
            let inputs = first.with_sink(first.cached_keys(&query, &block_table));
            calls.push(Call {
                plan: lengths.apply(call).plan(inputs)?,
                requests: of.len(),
                tokens,
                block_table,
                mask_bytes,
            });
        }
        Ok(Box::new(Calls(calls)))
    }
}

impl<T: Element> StepPlan<T> for Calls {
    fn memory(&self) -> StepMemory {
        StepMemory::of_calls(self.0.iter().map(|call| call.plan.workspace_bytes()))
            .holding(self.0.iter().map(|call| call.mask_bytes))
    }

    fn launch(&self, step: &StepContext<'_>, layer: &LayerTensors<'_, T>) -> Result<Tensor<T>> {
        launch_into_empty(self, step, layer)
    }

    fn launch_into(
        &self,
        step: &StepContext<'_>,
        layer: &LayerTensors<'_, T>,
        output: &mut Tensor<T>,
    ) -> Result<()> {
        for call in &self.0 {
            let query = layer.query.narrow(0, call.tokens.clone())?;
            let query = batched(&query, call.requests)?;
            let inputs = layer.with_sink(layer.cached_keys(&query, &call.block_table));
            let rows = output.narrow(0, call.tokens.clone())?;
            let mut rows = attention_alone(batched(&rows, call.requests)?);
            call.plan.launch_into(step.stream, inputs, &mut rows)?;
        }
        Ok(())
    }
}
