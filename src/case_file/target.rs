//! Which product and release a case runs on.

use ascend_spec::{Cann, Soc, Target};

use super::{Case, CaseError};
use crate::error::{Error, Result};
use crate::runtime::{Machine, Platform, Runtime, Stream};

impl<A> Case<A> {
    /// The product and release that the case is for. Where it names no product or no release, those of `otherwise`
    /// stand in, or the newest release if that of `otherwise` does not know the case's product. A chip of no known
    /// family counts as none.
    pub fn target(&self, otherwise: Target) -> Target {
        self.named_target().or(otherwise)
    }

    pub(crate) fn named_target(&self) -> NamedTarget<'_> {
        NamedTarget { soc_name: self.soc_name.as_deref(), cann: self.cann }
    }
}

/// The chip and the release that a case names, where it names them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NamedTarget<'a> {
    soc_name: Option<&'a str>,
    cann: Option<Cann>,
}

impl NamedTarget<'_> {
    fn soc(self) -> Option<Soc> {
        self.soc_name.and_then(Soc::from_name)
    }

    /// Refuses a chip with a release that does not know it.
    pub(super) fn released(self) -> std::result::Result<(), CaseError> {
        match (self.soc(), self.cann) {
            (Some(soc), Some(cann)) => {
                Target::new(soc, cann).released()?;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn or(self, otherwise: Target) -> Target {
        match (self.soc(), self.cann) {
            (Some(soc), None) => Target::with_default(soc, otherwise.cann),
            (soc, cann) => Target::new(soc.unwrap_or(otherwise.soc), cann.unwrap_or(otherwise.cann)),
        }
    }

    /// Returns a stream of the emulated machine that the case is for; `None` if the given stream's device already is
    /// what the case is for.
    ///
    /// # Errors
    /// [`Error::OtherTarget`] for another device that is not emulated; [`Error::Unreleased`] if the case and the
    /// device name a chip and a release that does not know it.
    pub(crate) fn other_stream(self, stream: &Stream) -> Result<Option<Stream>> {
        let device = stream.device();
        if self.soc_name.is_none() && self.cann.is_none() {
            return Ok(None);
        }
        let soc_name = self.soc_name.unwrap_or(device.soc_name());
        if Soc::from_name(soc_name).is_none() {
            return Err(Error::UnknownProduct { name: soc_name.to_owned() });
        }
        let target = device.target()?;
        let Target { soc, cann, .. } = self.or(target);
        if device.runtime().platform() != Platform::Emulated {
            return match admits(soc, cann, target) {
                Ok(()) => Ok(None),
                Err(instead) => Err(Error::OtherTarget { wanted: self.wanted(), device: target, instead }),
            };
        }
        if soc_name == device.soc_name() && cann == target.cann {
            return Ok(None);
        }
        let runtime = Runtime::emulated_as(&Machine::named(soc_name, cann))?;
        let other = runtime.device(device.id())?;
        if device.is_deterministic()? {
            other.set_deterministic(true)?;
        }
        other.stream().map(Some)
    }

    /// Describes the target that the case names.
    fn wanted(self) -> String {
        match (self.soc_name, self.cann) {
            (Some(soc), Some(cann)) => format!("{soc} with CANN {cann}"),
            (Some(soc), None) => soc.to_owned(),
            (None, Some(cann)) => format!("CANN {cann}"),
            (None, None) => "any device".to_owned(),
        }
    }
}

/// Refuses a device that cannot show what a call to this product and release does; the error names one that could.
fn admits(soc: Soc, cann: Cann, device: Target) -> std::result::Result<(), String> {
    if !soc.is_kin(device.soc) {
        return Err(format!("{soc}, or on the emulation"));
    }
    if cann > device.cann {
        return Err(format!("CANN {cann} or newer, or on the emulation"));
    }
    Ok(())
}
