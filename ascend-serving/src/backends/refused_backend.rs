//! Backends that could not serve a step, and why.

use std::fmt;

use ascend_attention as attention;
use ascend_attention::spec::{Cann, Level, Rule, Target};
use ascend_attention::{Device, Element, Violation};

use crate::batch::{AttentionState, LayerMask};
use crate::causality::Causality;
use crate::error::Error;
use crate::rules;

use super::backend::Backend;
use super::prompt_and_incre;
use super::step_context::{LayerTensors, StepContext};

/// A backend that could not serve a step.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct RefusedBackend {
    /// Its name.
    pub name: &'static str,
    /// Why it could not serve the step.
    pub why: Error,
    /// A product and release that take the refused call: the oldest newer release of the device's product, or else
    /// another product. `None` where none does, and where the backend refused the step by a rule of its own.
    pub taken_by: Option<Target>,
}

impl RefusedBackend {
    pub(crate) fn new(name: &'static str, why: Error, device: &Device) -> Self {
        let release = |since| {
            let cann = Cann::of_version(since)?.cann();
            let soc = device.target().ok()?.soc;
            Some(Target::new(soc, cann))
        };
        let taken_by = match &why {
            Error::Violation(violation) => violation.taken_by,
            Error::Attention(attention::Error::OperatorVersion { since, .. }) => release(since),
            _ => None,
        };
        Self { name, why: for_engines(name, why), taken_by }
    }
}

impl RefusedBackend {
    /// Whether a call was planned, which the operator would refuse.
    fn is_by_operator(&self) -> bool {
        matches!(&self.why, Error::Violation(violation) if violation.rule.level != Level::Library)
    }

    /// Why the backend refused, and which target takes the call.
    fn reason(&self) -> String {
        match self.taken_by {
            Some(target) => format!("{}; {target} takes the call", self.why),
            None => self.why.to_string(),
        }
    }
}

impl fmt::Display for RefusedBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.reason())
    }
}

/// Rewrites the operator's refusal of a batch in the terms of a scheduler, and that of a sparse mode, which the caller
/// of a backend of the library does not choose, as one of the step.
fn for_engines(name: &str, why: Error) -> Error {
    match why {
        Error::Violation(violation) if violation.rule.id == "sparse_mode.single_row" && Backend::has_name(name) => {
            Violation::new(
                &rules::BACKEND_STEP,
                "one new token in each request, under a mask in a call with a batch axis",
                "several new tokens in each request",
                "add `Backend::Fused` behind this one, or for layers that see every key `Backend::PagedDecode`",
            )
            .into()
        }
        Error::Violation(violation) if violation.rule.id == "cache.blocks" => {
            let given = violation.given;
            rules::BATCH_BLOCKS
                .broken(format_args!("{given}, shared blocks counted for each request"), violation.allowed)
                .into()
        }
        why => why,
    }
}

/// The rules of this layer that an error names.
fn rules_of(why: &Error) -> Vec<&'static Rule> {
    match why {
        Error::Violation(refused) => vec![refused.rule],
        Error::NoBackend { rules, .. } => rules.clone(),
        _ => Vec::new(),
    }
}

/// The rules by which backends refuse steps that they are not made for.
const OTHER_STEPS: [&Rule; 12] = [
    &rules::BACKEND_STEP,
    &rules::BACKEND_DECODE,
    &rules::BACKEND_SPLIT,
    &rules::BACKEND_TWO_CALLS,
    &rules::BACKEND_MASK,
    &rules::BACKEND_CHUNK,
    &rules::BACKEND_QUANTISED,
    &rules::BACKEND_MX_FP8,
    &rules::BACKEND_LATENT,
    &rules::BACKEND_CASCADE,
    &rules::BACKEND_SHARED_PREFIX,
    &rules::STEP_SHARED_KEYS,
];

/// The error of a step that no backend can serve, with the reason of each. Calls that another target takes come first,
/// then calls that the operator refuses, then what backends do not serve. Where a backend is made for such steps and
/// refuses this one, those for other steps are named with no more than the rule; those that are registered and not
/// tried come behind.
pub(crate) fn no_backend(refused: &[RefusedBackend], hint: Option<&str>) -> Error {
    let is_untried = |refused: &&RefusedBackend| refused.why.breaks(&rules::BACKEND_BOUND);
    let tried = || refused.iter().filter(|refused| !is_untried(refused));
    let is_other = |refused: &RefusedBackend| OTHER_STEPS.iter().find(|rule| refused.why.breaks(rule));
    let is_made_for_it = tried().any(|refused| is_other(refused).is_none());
    let (mut others, mut in_order) = (Vec::new(), Vec::new());
    for refused in tried() {
        match is_other(refused).filter(|_| is_made_for_it) {
            Some(rule) => others.push(format!("{} ({})", refused.name, rule.id)),
            None => in_order.push(refused),
        }
    }
    in_order.sort_by_key(|refused| (refused.taken_by.is_none(), !refused.is_by_operator()));
    // Backends with the same reason are listed together.
    let mut by_reason: Vec<(Vec<&str>, String)> = Vec::new();
    for refused in in_order {
        let reason = refused.reason();
        match by_reason.iter_mut().find(|(_, known)| *known == reason) {
            Some((names, _)) => names.push(refused.name),
            None => by_reason.push((vec![refused.name], reason)),
        }
    }
    let reasons = by_reason.iter();
    let reasons = reasons.map(|(names, reason)| format!("{}: {reason}", names.join(", ")));
    let mut reasons: Vec<String> = match refused {
        [] => vec!["there is none: `Backends::standard(&device)` has those of the device".to_owned()],
        _ => reasons.collect(),
    };
    if !others.is_empty() {
        reasons.push(format!("for other steps: {}", others.join(", ")));
    }
    let untried: Vec<_> = refused.iter().filter(is_untried).map(|refused| refused.name).collect();
    if !untried.is_empty() {
        let Rule { id, fix, .. } = rules::BACKEND_BOUND;
        reasons.push(format!("registered, not tried: {} ({id}); fix: {fix}", untried.join(", ")));
    }
    reasons.extend(hint.map(str::to_owned));
    let rules = refused.iter().flat_map(|refused| rules_of(&refused.why));
    Error::NoBackend { reasons: reasons.join("; "), rules: rules.collect() }
}

/// Advice on a backend that may serve the step, unless one of its name is registered.
pub(super) fn hint<T: Element>(
    step: &StepContext<'_>,
    first: &LayerTensors<'_, T>,
    is_registered: impl Fn(&str) -> bool,
) -> Option<&'static str> {
    if first.quantised.is_some() {
        return None;
    }
    let older = prompt_and_incre::is_all_of(step.stream.device());
    let is_plain = step.mask.causality().is_ok() && first.learnable_sink.is_none() && first.latent.is_none();
    if older {
        // It takes no named masks, sinks or latents, and no other backend serves this product.
        return (is_plain && !is_registered(Backend::PromptAndIncre.name())).then_some(
            "`.with(Backend::PromptAndIncre)`, named `prompt_and_incre`, adds PromptFlashAttention and \
             IncreFlashAttention, the fused attention of this product",
        );
    }
    let metadata = step.metadata;
    if let LayerMask::Named(_) = step.mask {
        return (!is_registered(Backend::NamedMask.name())).then_some(
            "`.with(Backend::NamedMask)`, named `named_mask`, adds calls with whole masks, by rules of the caller",
        );
    }
    if let LayerMask::Causality(Causality::Chunk(_)) = step.mask {
        return (!is_registered(Backend::ChunkedLocal.name())).then_some(
            "`.with(Backend::ChunkedLocal)`, named `chunked_local`, adds attention within chunks, by virtual \
                 requests",
        );
    }
    let decodes = metadata.state() == AttentionState::DecodeOnly
        && is_plain
        && *step.mask == LayerMask::Causality(Causality::Causal);
    let untried = !is_registered(Backend::PagedDecode.name());
    (decodes && untried).then_some(
        "`.with(Backend::PagedDecode)`, named `paged_decode`, adds the operator's decode path, which in steps such \
         as this one takes element types, head dimensions and blocks that packed calls of the release may not",
    )
}
