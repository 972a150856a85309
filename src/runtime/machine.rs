//! The machine that the emulation stands for.

use ascend_spec::ops::fused_infer_attention_score::Version;
use ascend_spec::{Cann, Soc};

/// An emulated chip with an installed CANN release, for [`Runtime::emulated_as`](super::Runtime::emulated_as).
///
/// ```
/// use ascend_attention::spec::{Cann, Soc, Target};
/// use ascend_attention::{Machine, Runtime};
///
/// # fn main() -> ascend_attention::Result<()> {
/// let runtime = Runtime::emulated_as(&Machine::new(Soc::AtlasA3, Cann::V8_5))?;
/// let target = runtime.device(0)?.target()?;
/// assert_eq!(target, Target::new(Soc::AtlasA3, Cann::V8_5));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Machine {
    soc_name: String,
    cann: Cann,
    operator: Option<Version>,
}

impl Machine {
    /// The release of the emulation where none is chosen.
    #[cfg(feature = "emulation")]
    pub const DEFAULT_CANN: Cann = ascend_emu::Machine::DEFAULT_CANN;
    /// The release of the emulation where none is chosen.
    #[cfg(not(feature = "emulation"))]
    pub const DEFAULT_CANN: Cann = Cann::NEWEST;

    /// A chip of a product, with a release. For a release that does not know the product
    /// [`Runtime::emulated_as`](super::Runtime::emulated_as) returns an error.
    pub fn new(soc: Soc, cann: Cann) -> Self {
        Self::named(soc.chip_name(), cann)
    }

    /// A chip by its name, such as `Ascend910B3`, with a release.
    pub fn named(soc_name: impl Into<String>, cann: Cann) -> Self {
        Self { soc_name: soc_name.into(), cann, operator: None }
    }

    /// Gives the machine another newest version of FusedInferAttentionScore than its release has.
    #[must_use]
    pub fn operator(mut self, newest: Version) -> Self {
        self.operator = Some(newest);
        self
    }

    /// The emulator's machine: equal ones do the same in everything.
    #[cfg(feature = "emulation")]
    pub(super) fn emulated(&self) -> crate::Result<ascend_emu::Machine> {
        let machine = ascend_emu::Machine::new(&self.soc_name, self.cann).map_err(refused)?;
        Ok(match self.operator {
            Some(newest) => machine.operator(newest),
            None => machine,
        })
    }
}

/// Why the emulator has no such machine.
#[cfg(feature = "emulation")]
pub(super) fn refused(error: ascend_emu::MachineError) -> crate::Error {
    use ascend_emu::MachineError::{TooMany, UnknownProduct, Unreleased};
    match error {
        UnknownProduct { name } => crate::Error::UnknownProduct { name },
        Unreleased(target) => crate::Error::Unreleased(target),
        TooMany { what, most } => crate::Error::invalid(
            "machine",
            format_args!("one more of the {what} that this process emulates"),
            format_args!("{most}"),
        )
        .fix("drop runtimes that the process no longer needs, or share one"),
        other => crate::Error::invalid("machine", other, "a chip of a known product with a release")
            .fix("choose a chip and release of `Machine`"),
    }
}
