//! What a contract holds for: a product, and a CANN release.

use crate::{Cann, Soc};
use std::fmt;

/// What versions 1 to 4 of FusedInferAttentionScore do with strided keys and values on Atlas A2 and A3 in 9.1, in
/// calls that the unified checker judges. The sources of that release disagree, and no device was asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum StridedKeys {
    /// The checks refuse them, as those of 9.1 say.
    #[default]
    Refused,
    /// Each call copies them to contiguous memory before the checks, as the operator definition of 9.1 says.
    Copied,
}

/// A product and a CANN release: what a call is checked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Target {
    /// Product.
    pub soc: Soc,
    /// Release.
    pub cann: Cann,
    /// The reading of 9.1 on Atlas A2 and A3 that holds for strided keys; other targets do not ask it.
    pub strided_keys: StridedKeys,
}

impl Target {
    /// `soc` with `cann`.
    pub const fn new(soc: Soc, cann: Cann) -> Self {
        Target { soc, cann, strided_keys: StridedKeys::Refused }
    }

    /// Sets the reading of 9.1 on Atlas A2 and A3 that holds for strided keys.
    #[must_use]
    pub const fn strided_keys(mut self, reading: StridedKeys) -> Self {
        self.strided_keys = reading;
        self
    }

    /// `soc` with the snapshot that stands in for releases 8.1 to 8.4.
    pub const fn snapshot(soc: Soc) -> Self {
        Target::new(soc, Cann::V8_1)
    }

    /// Whether the release knows the product.
    pub fn is_released(self) -> bool {
        self.soc.is_known_to(self.cann)
    }

    /// The first target that `takes` what this one refuses: the oldest newer release of its product, or else another
    /// product with the oldest release from this one's on.
    pub(crate) fn nearest(self, takes: impl Fn(Target) -> bool) -> Option<Target> {
        let from = |soc, is_beside: fn(&Cann, &Cann) -> bool| {
            let releases = Cann::ALL.into_iter();
            let releases = releases.filter(move |cann| is_beside(cann, &self.cann));
            releases.map(move |cann| Target::new(soc, cann))
        };
        let products = [Soc::AtlasA2, Soc::AtlasA3, Soc::Ascend950];
        let others = products.into_iter().filter(|soc| !soc.is_kin(self.soc));
        let others = others.flat_map(|soc| from(soc, Cann::ge));
        from(self.soc, Cann::gt).chain(others).find(|other| other.is_released() && takes(*other))
    }

    /// The target itself, if its release knows its product.
    ///
    /// # Errors
    /// [`UnreleasedTarget`] if it does not.
    ///
    /// ```
    /// use ascend_spec::{Cann, Soc, Target};
    ///
    /// assert!(Target::new(Soc::Ascend950, Cann::V9_1).released().is_ok());
    /// let error = Target::new(Soc::Ascend950, Cann::V8_5).released().unwrap_err();
    /// assert!(error.to_string().contains("allowed: 9.0, 9.1"));
    /// ```
    pub fn released(self) -> Result<Self, UnreleasedTarget> {
        match self.is_released() {
            true => Ok(self),
            false => Err(UnreleasedTarget { target: self }),
        }
    }

    /// `soc` with `cann` or, where that release does not know the product, with the newest one.
    pub fn with_default(soc: Soc, cann: Cann) -> Self {
        let target = Target::new(soc, cann);
        target.released().unwrap_or(Target::new(soc, Cann::NEWEST))
    }

    /// Whether the unified checks of Ascend 950 apply. The releases before 9.0 do not know the product: its contract
    /// there is that of Atlas A2 with the arguments of V5.
    pub(crate) fn is_950(self) -> bool {
        self.soc == Soc::Ascend950 && self.is_released()
    }
}

/// The error for a release that does not know the product: no such machine exists, and no contract for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{target}: that release does not know the product; allowed: {}; fix: choose one of these releases, or another chip",
    target.soc.releases().map(|cann| cann.to_string()).collect::<Vec<_>>().join(", ")
)]
pub struct UnreleasedTarget {
    /// The product and the release.
    pub target: Target,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} with CANN {}", self.soc, self.cann)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_that_does_not_know_a_product_is_no_target() {
        for cann in [Cann::V8_1, Cann::V8_5] {
            let target = Target::new(Soc::Ascend950, cann);
            assert_eq!(target.released(), Err(UnreleasedTarget { target }));
            let newest = Target::new(Soc::Ascend950, Cann::NEWEST);
            assert_eq!(Target::with_default(Soc::Ascend950, cann), newest);
            let old = Target::new(Soc::AtlasA2, cann);
            assert_eq!(old.released(), Ok(old));
            assert_eq!(Target::with_default(Soc::AtlasA2, cann), old);
        }
        assert!(Soc::Ascend950.releases().eq([Cann::V9_0, Cann::V9_1, Cann::V9_2]));
        assert!(Soc::AtlasA3.releases().eq(Cann::ALL));
    }
}
