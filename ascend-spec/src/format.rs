//! Storage formats, with the numbers CANN gives them (`aclFormat`).

use std::fmt;

/// How a tensor's elements are laid out in memory. The discriminant is CANN's `aclFormat` value.
///
/// Operators take every [plain](Format::is_plain) format for [`Format::Nd`]: PyTorch's plugin names a tensor of three
/// axes [`Format::Ncl`], one of four [`Format::Nchw`] and one of five [`Format::Ncdhw`], whatever the axes mean.
/// Source: `acl/acl_base.h`, CANN 8.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
#[allow(missing_docs, reason = "the names are CANN's; each says its own axis order")]
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
    FractalNzC0x16 = 50,
    FractalNzC0x32 = 51,
}

impl Format {
    const ALL: [Format; 17] = [
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
        Format::FractalNzC0x16,
        Format::FractalNzC0x32,
    ];

    /// The format with CANN's number `value`, or `None` for numbers without a format here.
    pub fn from_acl(value: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.acl() == value)
    }

    /// CANN's number (`aclFormat`).
    pub const fn acl(self) -> i32 {
        self as i32
    }

    /// Whether the elements are stored row by row in the order of the described axes. The other formats are private
    /// to the device: they store blocks of a fixed size, or their layout is unknown.
    pub const fn is_plain(self) -> bool {
        match self {
            Format::Nd
            | Format::Nchw
            | Format::Nhwc
            | Format::Hwcn
            | Format::Ndhwc
            | Format::Ncdhw
            | Format::Nc
            | Format::Ncl => true,
            Format::Undefined
            | Format::Nc1hwc0
            | Format::FractalZ
            | Format::Nc1hwc0C04
            | Format::FractalNz
            | Format::Ndc1hwc0
            | Format::FractalZ3d
            | Format::FractalNzC0x16
            | Format::FractalNzC0x32 => false,
        }
    }

    /// The plain formats, as a message names them.
    pub(crate) const PLAIN: &'static str =
        "ND (also NCL, NCHW, NHWC, HWCN, NCDHW, NDHWC and NC, which mean the same here)";
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
