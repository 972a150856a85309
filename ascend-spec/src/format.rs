//! Storage formats, with the numbers CANN gives them (`aclFormat`).

use std::fmt;

/// How a tensor's elements lie in memory. The discriminant is CANN's `aclFormat` value.
///
/// Attention takes [`Format::Nd`]; its checks tolerate three of the image formats, which mean the same for them.
/// Source: `acl/acl_base.h`, CANN 8.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
#[allow(missing_docs)] // The names are CANN's; each says its own axis order.
pub enum Format {
    Undefined = -1,
    Nchw = 0,
    Nhwc = 1,
    Nd = 2,
    Nc1hwc0 = 3,
    FractalZ = 4,
    Nc1hwc0C04 = 12,
    Hwcn = 16,
    Ndhwc = 27,
    FractalNz = 29,
    Ncdhw = 30,
    Ndc1hwc0 = 32,
    FractalZ3d = 33,
    Nc = 35,
    Ncl = 47,
}

impl Format {
    const ALL: [Format; 15] = [
        Format::Undefined,
        Format::Nchw,
        Format::Nhwc,
        Format::Nd,
        Format::Nc1hwc0,
        Format::FractalZ,
        Format::Nc1hwc0C04,
        Format::Hwcn,
        Format::Ndhwc,
        Format::FractalNz,
        Format::Ncdhw,
        Format::Ndc1hwc0,
        Format::FractalZ3d,
        Format::Nc,
        Format::Ncl,
    ];

    /// The format with CANN's number `value`, or `None` where CANN 8.1 has no such format.
    pub fn from_acl(value: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.acl() == value)
    }

    /// CANN's number (`aclFormat`).
    pub const fn acl(self) -> i32 {
        self as i32
    }

    /// Whether attention's checks let this format pass.
    pub const fn is_plain(self) -> bool {
        matches!(
            self,
            Format::Nd | Format::Nchw | Format::Nhwc | Format::Ncdhw
        )
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_round_trip() {
        for format in Format::ALL {
            assert_eq!(Format::from_acl(format.acl()), Some(format));
        }
        assert_eq!(Format::from_acl(5), None);
    }
}
