//! Which product and release a case runs on.

use ascend_spec::{Cann, Soc, Target};

use super::Case;
use crate::error::{Error, Result};
use crate::runtime::{Backend, Machine, Runtime, Stream};

impl Case {
    /// What the case is for; where it names no product or no release, those of `otherwise`, or the newest release if that
    /// of `otherwise` does not know the case's product. A chip of no known family counts as none.
    pub fn target(&self, otherwise: Target) -> Target {
        let soc = self.soc_name.as_deref().and_then(Soc::from_name);
        match (soc, self.cann) {
            (Some(soc), None) => Target::with_default(soc, otherwise.cann),
            (soc, cann) => {
                Target::new(soc.unwrap_or(otherwise.soc), cann.unwrap_or(otherwise.cann))
            }
        }
    }

    /// A stream of an emulated machine that the case is for; `None` if the given one is of such a device already.
    ///
    /// # Errors
    /// [`Error::OtherTarget`] if it is not, and not emulated either; [`Error::Unreleased`] if the case and the device name a
    /// chip and a release that do not know each other.
    pub(crate) fn other_stream(&self, stream: &Stream) -> Result<Option<Stream>> {
        let device = stream.device();
        if self.soc_name.is_none() && self.cann.is_none() {
            return Ok(None);
        }
        let soc_name = self.soc_name.as_deref().unwrap_or(device.soc_name());
        if Soc::from_name(soc_name).is_none() {
            return Err(Error::UnknownProduct {
                name: soc_name.to_owned(),
            });
        }
        let target = device.target()?;
        let Target { soc, cann, .. } = self.target(target);
        if device.runtime().backend() != Backend::Emulated {
            return match self.admits(soc, cann, target) {
                Ok(()) => Ok(None),
                Err(instead) => Err(Error::OtherTarget {
                    wanted: self.wanted(),
                    device: target,
                    instead,
                }),
            };
        }
        if self
            .soc_name
            .as_deref()
            .is_none_or(|name| name == device.soc_name())
            && cann == target.cann
        {
            return Ok(None);
        }
        let runtime = Runtime::emulated_as(&Machine::named(soc_name, cann))?;
        runtime.device(device.id())?.stream().map(Some)
    }

    /// Whether a device can show what the case says; if not, what could.
    fn admits(&self, soc: Soc, cann: Cann, device: Target) -> std::result::Result<(), String> {
        if !soc.is_kin(device.soc) {
            return Err(format!("{soc}, or on the emulation"));
        }
        if cann > device.cann {
            return Err(format!("CANN {cann} or newer, or on the emulation"));
        }
        Ok(())
    }

    /// What the case says that it is for.
    fn wanted(&self) -> String {
        match (&self.soc_name, self.cann) {
            (Some(soc), Some(cann)) => format!("{soc} with CANN {cann}"),
            (Some(soc), None) => soc.clone(),
            (None, Some(cann)) => format!("CANN {cann}"),
            (None, None) => "any device".to_owned(),
        }
    }
}
