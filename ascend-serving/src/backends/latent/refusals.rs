//! The inputs of latent attention, and the layers and steps that no call of it computes.

use std::fmt;

use ascend_attention::{Element, Violation};

use crate::backends::{LatentForm, LatentTensors, LayerTensors, StepContext};
use crate::batch::LayerMask;
use crate::causality::Causality;
use crate::rules;

/// The refusal of a layer that no call of latent attention computes.
fn refused(given: impl fmt::Display, fix: &'static str) -> Violation {
    Violation::new(
        &rules::BACKEND_LATENT,
        given,
        "latents and rotary parts, one key head, causal, without window and sinks",
        fix,
    )
}

/// The latent inputs of a layer; layers that no call computes are refused.
pub(super) fn latent_inputs<'a, T: Element>(layer: &LayerTensors<'a, T>) -> Result<LatentTensors<'a, T>, Violation> {
    match (layer.latent, layer.learnable_sink) {
        (None, _) => Err(refused(
            "a layer without rotary parts",
            "make the inputs of layers of multi-head latent attention by `LayerInputs::latent`",
        )),
        (Some(_), Some(_)) => {
            Err(refused("sinks", "no operator here computes a latent layer with sinks; compute it outside of the step"))
        }
        (Some(latent), None) => Ok(latent),
    }
}

/// Refuses other caches than those of latents of one byte.
pub(super) fn check_quantised_latents<T: Element>(layer: &LayerTensors<'_, T>) -> Result<(), Violation> {
    let (given, fix) = match layer.quantised {
        Some(cache) if cache.latent_scale().is_some() => return Ok(()),
        Some(cache) => (
            format!("a cache with {}", cache.describe_scales()),
            "make the cache by `PagedKvCache::quantised_latents`, or serve keys and values by \
             `Backend::QuantisedDecode`",
        ),
        None => (
            format!("a cache of {}", T::DTYPE),
            "make the cache by `PagedKvCache::quantised_latents`, or add `Backend::MLA_256_MIB`",
        ),
    };
    Err(Violation::new(&rules::BACKEND_QUANTISED, given, "a cache of `PagedKvCache::quantised_latents`", fix))
}

/// Refuses queries in a form that the layer's cache does not go with.
pub(super) fn check_form<T: Element>(form: LatentForm<'_, T>, layer: &LayerTensors<'_, T>) -> Result<(), Violation> {
    match (layer.quantised, form) {
        (None, LatentForm::Absorbed | LatentForm::Plain(_) | LatentForm::Mixed { .. }) => Ok(()),
        (None, LatentForm::Quantised(_) | LatentForm::QuantisedMixed { .. }) => Err(Violation::new(
            &rules::BACKEND_LATENT,
            "quantised queries over latents of 16 bits",
            "absorbed, plain or mixed queries",
            "make the cache by `PagedKvCache::quantised_latents`, or bring absorbed queries of 16 bits",
        )),
        (Some(_), LatentForm::Quantised(_) | LatentForm::Plain(_) | LatentForm::QuantisedMixed { .. }) => Ok(()),
        (Some(cache), LatentForm::Absorbed | LatentForm::Mixed { .. }) => Err(Violation::new(
            &rules::BACKEND_LATENT,
            format_args!("queries in the form {form:?} over latents of {}", cache.stored().dtype()),
            "quantised queries, or plain ones",
            "quantise absorbed queries (`QuantisedQueries`): `LayerInputs::quantised_latent`, and beside those of \
             prefills `LatentForm::QuantisedMixed`",
        )),
    }
}

/// Refuses steps that no form of latent attention computes.
pub(super) fn check_step(step: &StepContext<'_>) -> Result<(), Violation> {
    let causal = "give layers of latent attention the mask of `Causality::Causal`, by the step or by \
                  `LayerInputs::mask`";
    match step.mask {
        LayerMask::Causality(Causality::Causal) if step.shape.kv_heads == 1 => Ok(()),
        LayerMask::Causality(Causality::Causal) => Err(refused(
            format_args!("{} key heads", step.shape.kv_heads),
            "make the `AttentionShape` by `AttentionShape::latent`",
        )),
        LayerMask::Causality(other) => Err(refused(format_args!("{other:?}"), causal)),
        mask @ LayerMask::Named(_) => Err(Violation::new(
            &rules::BACKEND_MASK,
            mask,
            "causal layers: no call of latent attention takes another mask",
            causal,
        )),
    }
}
