//! Capped scores, which the emulation computes and no operator of an NPU does.

use ascend_spec::Violation;
use ascend_spec::attention_problem::SoftCap;

use crate::error::{Error, Result};
use crate::rules;
use crate::runtime::{Context, Platform};

/// The cap of a call's scores that is asked for, unchecked.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CallCap(pub(super) Option<f64>);

impl CallCap {
    /// Refuses a cap that is no number of at least 1.2e-38 and finite in 32 bits, and any cap where the emulation of
    /// this process does not compute.
    pub(super) fn admitted(self, context: &Context) -> Result<()> {
        let Some(cap) = self.0 else {
            return Ok(());
        };
        if SoftCap::new(cap).is_none() {
            return Err(Error::invalid("soft_cap", cap, SoftCap::ALLOWED)
                .fix("give the cap of the model's configuration, such as 50, or leave it out where it has none or 0"));
        }
        match context.runtime().platform() {
            Platform::Emulated if cfg!(feature = "emulation") => Ok(()),
            platform => Err(Violation::new(
                &rules::EMULATED_ONLY,
                format_args!("scores capped at {cap}, on the platform {platform}"),
                "scores without a cap, on every platform but the emulation of this process",
                "leave `emulated_only_soft_cap` out and compute such layers by a matrix product, tanh, mask, softmax \
                 and a second product: the scores, rows times keys for each head, go through device memory after each \
                 of them, where the fused operator keeps them on the chip",
            )
            .into()),
        }
    }

    /// Prepares calls whose scores the emulation caps.
    pub(super) fn prepare<R>(self, prepare: impl FnOnce() -> R) -> R {
        #[cfg(feature = "emulation")]
        if let Some(cap) = self.0.and_then(SoftCap::new) {
            return ascend_emu::emulated_only::with_soft_cap(cap, prepare);
        }
        prepare()
    }
}
