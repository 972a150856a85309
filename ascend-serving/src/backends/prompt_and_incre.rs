//! Any step by PromptFlashAttention and IncreFlashAttention.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use ascend_attention::attention::{BlockTable, Inputs};
use ascend_attention::incre::{IncreFlashAttention, IncrePlan};
use ascend_attention::prompt::{PromptFlashAttention, PromptPlan};
use ascend_attention::spec::ops::incre_flash_attention::IncreCall;
use ascend_attention::spec::ops::prompt_flash_attention::{self, PromptCall};
use ascend_attention::spec::{Layout, ops::fused_infer_attention_score as fia};
use ascend_attention::{Device, Element, Mask, Stream, Tensor, Violation};

use crate::batch::AttentionMetadata;
use crate::causality::Causality;
use crate::error::Result;
use crate::kv::CachedRows;
use crate::rules;
use crate::sharing::lock;

use super::copied_rows::{CopiedRows, KeyRows, Prompt, Prompts};
use super::paged_decode::{layout, rows};
use super::program::{StepProgram, StepStage};
use super::step_context::{LayerTensors, StepContext, batched};
use super::step_memory::StepMemory;

/// Whether the device has these operators and no FusedInferAttentionScore.
pub(super) fn is_all_of(device: &Device) -> bool {
    let prompt = prompt_flash_attention::Version::V3;
    device
        .target()
        .is_ok_and(|target| prompt.runs_on(target) && !fia::Version::ALL.iter().any(|fused| fused.runs_on(target)))
}

/// Neighbouring requests of a step that one call computes.
#[derive(Debug)]
struct Neighbours {
    call: Call,
    requests: Range<usize>,
    /// Their query tokens.
    tokens: Range<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    /// One new token for each request, which sees every key.
    Incre,
    Prompt(Prompt),
}

impl Call {
    /// Most requests of a call, on the product that takes the fewest.
    fn most_requests(self) -> usize {
        match self {
            Self::Incre => IncreCall::MOST_CARD_SEQUENCES as usize,
            Self::Prompt(_) => PromptCall::MOST_CARD_SEQUENCES as usize,
        }
    }
}

impl Neighbours {
    /// Divides all requests of a step, dummies included, into runs that one call computes.
    fn of(metadata: &AttentionMetadata, causality: Causality) -> Vec<Self> {
        let mut all: Vec<Self> = Vec::new();
        let mut token = 0usize;
        for (request, (new, cached)) in metadata.new_and_cached().enumerate() {
            let shown_from = causality.shown_from(cached);
            let call = match (new, shown_from) {
                (1, 0) => Call::Incre,
                _ => Call::Prompt(Prompt {
                    new,
                    keys: cached.saturating_sub(shown_from) + new,
                    cached: cached > 0,
                    masked: new > 1 && causality != Causality::Bidirectional,
                }),
            };
            let (behind, end) = (request + 1, token + new);
            match all.last_mut() {
                Some(last) if last.call == call && last.requests.len() < call.most_requests() => {
                    (last.requests.end, last.tokens.end) = (behind, end);
                }
                _ => all.push(Self { call, requests: request..behind, tokens: token..end }),
            }
            token = end;
        }
        all
    }

    /// For each of these requests the cache rows of its last `keys` tokens.
    fn cached_rows(&self, metadata: &AttentionMetadata, keys: usize) -> Result<Vec<CachedRows>, Violation> {
        let of_request = |request: usize| {
            let len = metadata.kv_lengths().lengths().get(request).copied();
            let len = len.unwrap_or(0);
            metadata.cached_rows([(request, len.saturating_sub(keys)..len)])
        };
        self.requests.clone().map(of_request).collect()
    }
}

/// A planned call of a step, by one of the two older operators.
#[derive(Debug)]
enum PromptOrIncre {
    Incre(Box<PlannedIncre>),
    Prompt { plan: Arc<PromptPlan>, prompts: Prompts },
}

#[derive(Debug)]
struct PlannedIncre {
    plan: IncrePlan,
    layout: Layout,
    block_table: BlockTable,
}

/// The calls of a step, each with its query tokens.
struct StepCalls<T: Element> {
    calls: Vec<(Range<usize>, PromptOrIncre)>,
    copied: Mutex<CopiedRows<T>>,
}

fn plan_incre<T: Element>(
    step: &StepContext<'_>,
    first: &LayerTensors<'_, T>,
    neighbours: &Neighbours,
) -> Result<PromptOrIncre> {
    let layout = layout(first.cache);
    let block_table = step.block_table.rows(neighbours.requests.clone())?;
    let query = rows(layout, &first.query.narrow(0, neighbours.tokens.clone())?)?;
    let lengths = step.metadata.kv_lengths().lengths();
    let lengths = lengths.get(neighbours.requests.clone()).unwrap_or_default();
    let inputs = Inputs::new(&query, &first.cache.key, &first.cache.value);
    let plan = IncreFlashAttention::new(layout)
        .heads(step.shape.heads)
        .kv_heads(step.shape.kv_heads)
        .scale(step.shape.scale)
        .actual_seq_lengths_kv(lengths)
        .plan(inputs.paged(&block_table))?;
    Ok(PromptOrIncre::Incre(Box::new(PlannedIncre { plan, layout, block_table })))
}

fn plan_prompt<T: Element>(
    step: &StepContext<'_>,
    prompts: &Prompts,
    query: &Tensor<T>,
    keys: &KeyRows<T>,
) -> Result<PromptPlan> {
    let Prompts { requests, prompt, .. } = prompts;
    let mask = match prompt.masked {
        true => {
            let masks = step.stream.device().masks();
            step.mask.causality()?.square_mask(&masks, prompt.rows())?
        }
        false => Mask::none(),
    };
    let keys = keys.batched(*requests)?;
    let call = PromptFlashAttention::new(Layout::Bsh)
        .heads(step.shape.heads)
        .kv_heads(step.shape.kv_heads)
        .scale(step.shape.scale)
        .mask(mask);
    Ok(call.plan((&batched(query, *requests)?, &keys.key, &keys.value))?)
}

/// Whether a row's bits depend on the row alone: without a window. Under one the copied keys begin where the step's
/// first token sees.
pub(super) fn is_batch_invariant(step: &StepContext<'_>) -> bool {
    step.mask.causality().is_ok_and(|causality| causality.window().is_none())
}

pub(super) fn program<T: Element>(step: &StepContext<'_>, first: &LayerTensors<'_, T>) -> Result<StepProgram<T>> {
    if first.learnable_sink.is_some() {
        let refused = rules::BACKEND_PROMPT_AND_INCRE.broken("a layer with sinks", "layers without");
        return Err(refused.into());
    }
    step.shape.check_no_soft_cap(
        "PromptFlashAttention and IncreFlashAttention",
        "emulate Atlas A2 or newer, with `Backend::Fused`",
    )?;
    if !first.cache.key.is_contiguous() || !first.cache.value.is_contiguous() {
        return Err(Violation::new(
            &rules::BACKEND_PROMPT_AND_INCRE,
            "a cache whose blocks lie apart",
            "keys and values that are contiguous",
            "make the cache by `CacheShape` without `side_by_side`: what these operators do with strides is not \
             known",
        )
        .into());
    }
    let metadata = step.metadata;
    let causality = step.mask.causality()?;
    let all = Neighbours::of(metadata, causality);
    let prompts = all.iter().filter_map(|run| match run.call {
        Call::Prompt(prompt) => Some((prompt, run.requests.len())),
        Call::Incre => None,
    });
    let copied = CopiedRows::for_step(step, first, prompts)?;
    let mut calls = Vec::with_capacity(all.len());
    let mut alike: Vec<(usize, Prompt, Arc<PromptPlan>)> = Vec::new();
    for run in all {
        let planned = match run.call {
            Call::Incre => plan_incre(step, first, &run)?,
            Call::Prompt(prompt) => {
                let requests = run.requests.len();
                let cached = match prompt.cached {
                    true => run.cached_rows(metadata, prompt.keys)?,
                    false => Vec::new(),
                };
                let prompts = Prompts { requests, prompt, cached };
                let known = |known: &&(usize, Prompt, _)| (known.0, known.1) == (requests, prompt);
                let plan = match alike.iter().find(known) {
                    Some((.., plan)) => plan.clone(),
                    None => {
                        let query = match prompt.is_padded() {
                            true => copied.query(&prompts)?,
                            false => first.query.narrow(0, run.tokens.clone())?,
                        };
                        let keys = match prompt.copies_keys() {
                            true => copied.keys(&prompts)?,
                            false => KeyRows::of_step(first)?.narrow(run.tokens.clone())?,
                        };
                        let plan = Arc::new(plan_prompt(step, &prompts, &query, &keys)?);
                        alike.push((requests, prompt, plan.clone()));
                        plan
                    }
                };
                PromptOrIncre::Prompt { plan, prompts }
            }
        };
        calls.push((run.tokens, planned));
    }
    Ok(StepProgram::new([]).stage(StepCalls { calls, copied: Mutex::new(copied) }))
}

impl<T: Element> fmt::Debug for StepCalls<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StepCalls").field("calls", &self.calls).finish_non_exhaustive()
    }
}

impl<T: Element> StepStage<T> for StepCalls<T> {
    fn memory(&self) -> StepMemory {
        let calls = self.calls.iter().map(|(_, planned)| match planned {
            PromptOrIncre::Incre(run) => run.plan.workspace_bytes(),
            PromptOrIncre::Prompt { plan, .. } => plan.workspace_bytes(),
        });
        StepMemory::of_calls(calls).holding([lock(&self.copied).bytes()])
    }

    fn reads_own_keys(&self) -> bool {
        self.calls.iter().any(|(_, planned)| matches!(planned, PromptOrIncre::Prompt { .. }))
    }

    fn launch_into(&self, stream: &Stream, layer: &LayerTensors<'_, T>, output: &mut Tensor<T>) -> Result<()> {
        // The lock is held until all is queued: copies and calls of two layers must not mix.
        let copied = lock(&self.copied);
        for (tokens, planned) in &self.calls {
            let query = layer.query.narrow(0, tokens.clone())?;
            let attention = output.narrow(0, tokens.clone())?;
            match planned {
                PromptOrIncre::Incre(run) => {
                    let query = rows(run.layout, &query)?;
                    let mut attention = rows(run.layout, &attention)?;
                    let inputs = Inputs::new(&query, &layer.cache.key, &layer.cache.value);
                    let inputs = inputs.paged(&run.block_table);
                    run.plan.launch_into(stream, inputs, &mut attention)?;
                }
                PromptOrIncre::Prompt { plan, prompts } => {
                    let own = || KeyRows::of_step(layer)?.narrow(tokens.clone());
                    let keys = match prompts.prompt.copies_keys() {
                        true => copied.bring_keys(stream, prompts, layer.cache, own)?,
                        false => own()?,
                    };
                    let keys = keys.batched(prompts.requests)?;
                    let padded = prompts.prompt.is_padded();
                    let (query, place) = match padded {
                        true => (copied.bring_query(stream, prompts, &query)?, copied.attention(prompts)?),
                        false => (query, attention.clone()),
                    };
                    let query = batched(&query, prompts.requests)?;
                    let inputs = Inputs::new(&query, &keys.key, &keys.value);
                    let mut place = batched(&place, prompts.requests)?;
                    plan.launch_into(stream, inputs, &mut place)?;
                    if padded {
                        copied.take_attention(stream, prompts, &attention)?;
                    }
                }
            }
        }
        Ok(())
    }
}
