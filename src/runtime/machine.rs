//! What the emulation passes for.

use ascend_spec::fia::Version;
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
    /// A chip of a product, with a release.
    pub fn new(soc: Soc, cann: Cann) -> Self {
        let name = match soc {
            Soc::AtlasA2 => "Ascend910B3",
            Soc::AtlasA3 => "Ascend910_9391",
            Soc::Ascend950 => "Ascend950PR_9599",
            Soc::AtlasInference => "Ascend310P3",
            Soc::AtlasTraining => "Ascend910A",
            Soc::Atlas200I500A2 => "Ascend310B1",
        };
        Self::named(name, cann)
    }

    /// A chip by its name, such as `Ascend910B3`, with a release.
    pub fn named(soc_name: impl Into<String>, cann: Cann) -> Self {
        Self {
            soc_name: soc_name.into(),
            cann,
            operator: None,
        }
    }

    /// Gives the machine another newest version of the attention operator than its release has.
    #[must_use]
    pub fn operator(mut self, newest: Version) -> Self {
        self.operator = Some(newest);
        self
    }

    /// The functions of the emulated machine.
    #[cfg(feature = "emulation")]
    pub(super) fn functions(&self) -> crate::Result<ascend_sys::Functions> {
        let machine = ascend_emu::Machine::new(&self.soc_name, self.cann);
        let machine = machine.ok_or_else(|| crate::Error::UnknownProduct {
            name: self.soc_name.clone(),
        })?;
        let machine = match self.operator {
            Some(newest) => machine.operator(newest),
            None => machine,
        };
        ascend_emu::functions_of(&machine).ok_or_else(|| {
            crate::Error::invalid(
                "machine",
                format_args!("{self:?}, after 32 others"),
                "32 different machines in a process",
            )
        })
    }
}
