//! What deterministic attention asks of the device and of its backends.

use ascend_attention::{Device, Element, Violation};

use crate::error::Result;
use crate::rules;

use super::attention_backend::AttentionBackend;
use super::step_context::{LayerTensors, StepContext};

/// Refuses to plan deterministic attention on a device that is not set to deterministic operators.
pub(crate) fn check_deterministic(deterministic: bool, device: &Device) -> Result<()> {
    match !deterministic || device.is_deterministic()? {
        true => Ok(()),
        false => Err(rules::DEVICE_DETERMINISTIC
            .broken(format_args!("device {} without the option", device.id()), "a device with it")
            .into()),
    }
}

/// Refuses a backend whose rows depend on more than the row.
pub(super) fn check_backend<T: Element>(
    backend: &dyn AttentionBackend<T>,
    step: &StepContext<'_>,
    first: &LayerTensors<'_, T>,
) -> Result<(), Violation> {
    match backend.is_batch_invariant(step, first) {
        true => Ok(()),
        false => Err(rules::BACKEND_DETERMINISTIC.broken(
            format_args!("the backend `{}`, whose rows' bits may depend on their batch", backend.name()),
            "backends that compute each row by one call, over keys that begin at the same token in every step",
        )),
    }
}
