//! The interface of attention backends.

use ascend_attention::{Element, Violation};

use crate::error::Result;
use crate::rules;

use super::program::StepProgram;
use super::step_context::{LayerTensors, StepContext, check_quantised_mask};

/// Refuses a quantised cache on behalf of a backend that does not support its scales.
fn check_reads_cache<T: Element>(
    backend: &(impl AttentionBackend<T> + ?Sized),
    step: &StepContext<'_>,
    layer: &LayerTensors<'_, T>,
) -> Result<(), Violation> {
    match layer.quantised {
        Some(layer_cache) if layer_cache.is_sparse() => Err(Violation::new(
            &rules::BACKEND_QUANTISED,
            "a quantised cache of sparse attention",
            "a quantised cache with scales of channels or tokens, or one of 16 bits",
            "compute the step by `SparseLatent`, which no backend replaces, or make the cache by `PagedKvCache::new`",
        )),
        Some(_) if backend.reads_quantised() => Ok(()),
        None => Ok(()),
        // Under a mask that no backend for quantised caches takes, none of them is advised.
        Some(_) => Err(check_quantised_mask(step).err().unwrap_or_else(|| {
            rules::BACKEND_QUANTISED.broken("a quantised cache", format_args!("a cache of {}", T::DTYPE))
        })),
    }
}

/// Refuses latent attention on behalf of a backend that supports keys and values alone.
fn check_reads_latents<T: Element>(
    backend: &(impl AttentionBackend<T> + ?Sized),
    layer: &LayerTensors<'_, T>,
) -> Result<(), Violation> {
    match layer.latent.is_none() || backend.reads_latents() {
        true => Ok(()),
        false => Err(Violation::new(
            &rules::BACKEND_LATENT,
            "latents and rotary parts",
            "keys and values",
            match layer.quantised {
                None => "add `Backend::MLA_256_MIB`",
                Some(_) => "add `Backend::QUANTISED_MLA_256_MIB`",
            },
        )),
    }
}

/// A way to compute attention: a function from a step to a program ([`StepProgram`]), which is planned once for each
/// step and launched once for each layer ([`StepPlan`](crate::StepPlan)).
pub trait AttentionBackend<T: Element>: Send + Sync {
    /// Its name.
    fn name(&self) -> &'static str;

    /// Whether it reads quantised caches ([`LayerTensors::quantised`]). Other backends are not called where the cache
    /// is quantised.
    fn reads_quantised(&self) -> bool {
        false
    }

    /// Whether it computes multi-head latent attention ([`LayerTensors::latent`]). Other backends are not called for
    /// layers with latents.
    fn reads_latents(&self) -> bool {
        false
    }

    /// Whether deterministic operators make a row's bits depend on the row's query and keys alone
    /// ([`Attention::deterministic`](crate::Attention::deterministic)), in steps such as this one: each row is computed
    /// by one call, over keys of its request that begin at the same token in every step, and that have the same values
    /// whether they are the step's own or cached. Backends that merge parts, read own keys more exactly than cached
    /// ones, or change the formula with the step do not: deterministic attention does not call them.
    fn is_batch_invariant(&self, _: &StepContext<'_>, _: &LayerTensors<'_, T>) -> bool {
        false
    }

    /// Describes the work of a step, for layers whose tensors have the shapes of `first`: the tensors of the first
    /// layer that the program will serve.
    ///
    /// For graphs ([`StepContext::recorded`]) a capture asks for steps of dummy requests alone:
    /// [`AttentionMetadata::requests`](crate::AttentionMetadata::requests) is 0, and the table has a row for each. Each
    /// replay asks again, with its requests.
    ///
    /// # Errors
    /// The reason why it cannot serve the step. Nothing is launched.
    fn program(&self, step: &StepContext<'_>, first: &LayerTensors<'_, T>) -> Result<StepProgram<T>>;
}

/// The program of a backend, checked: what its calls compute and read is the step's.
///
/// # Errors
/// The reason why the backend cannot serve the step, or why it may not compute it so.
pub(crate) fn checked_program<T: Element>(
    backend: &(impl AttentionBackend<T> + ?Sized),
    step: &StepContext<'_>,
    first: &LayerTensors<'_, T>,
) -> Result<StepProgram<T>> {
    check_reads_cache(backend, step, first)?;
    check_reads_latents(backend, first)?;
    let program = backend.program(step, first)?;
    program.check(step, first)?;
    Ok(program)
}
