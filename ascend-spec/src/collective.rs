//! The collectives of HCCL: who sends how much to whom, and which element types and reductions products have.
//!
//! Source: HCCL's operator documents; what is written of it here holds for CANN 8.1 and later.

use crate::{DType, Soc};

/// How a rank's buffer belongs to the other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Share {
    /// There is no buffer.
    Nothing,
    /// All of it belongs to every rank.
    Whole,
    /// Part r, counted in the order of the ranks, belongs to rank r.
    Parts,
}

/// What the root of a collective does alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Root {
    /// There is no root.
    Nothing,
    /// It alone sends.
    Sends,
    /// It alone receives.
    Receives,
}

macro_rules! collectives {
    ($(
        $(#[$doc:meta])*
        $name:ident = $function:literal, $sent:ident, $received:ident, $root:ident;
    )*) => {
        /// A collective: an operator that every rank of a communicator calls.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Collective {
            $( $(#[$doc])* $name, )*
        }

        impl Collective {
            /// Every collective.
            pub const ALL: &[Collective] = &[$( Collective::$name, )*];

            /// The C function.
            pub const fn function(self) -> &'static str {
                match self { $( Collective::$name => $function, )* }
            }

            /// What a rank sends.
            pub const fn sent(self) -> Share {
                match self { $( Collective::$name => Share::$sent, )* }
            }

            /// What a rank receives.
            pub const fn received(self) -> Share {
                match self { $( Collective::$name => Share::$received, )* }
            }

            /// What its root does.
            pub const fn root(self) -> Root {
                match self { $( Collective::$name => Root::$root, )* }
            }
        }
    };
}

collectives! {
    /// Waits for every rank.
    Barrier = "HcclBarrier", Nothing, Nothing, Nothing;
    /// Reduces to every rank.
    AllReduce = "HcclAllReduce", Whole, Whole, Nothing;
    /// Reduces to the root.
    Reduce = "HcclReduce", Whole, Whole, Receives;
    /// Copies from the root to every rank.
    Broadcast = "HcclBroadcast", Whole, Whole, Sends;
    /// Copies from every rank to every rank.
    AllGather = "HcclAllGather", Whole, Parts, Nothing;
    /// [`AllGather`](Self::AllGather) of parts of any sizes.
    AllGatherV = "HcclAllGatherV", Whole, Parts, Nothing;
    /// Reduces, and leaves part r to rank r.
    ReduceScatter = "HcclReduceScatter", Parts, Whole, Nothing;
    /// [`ReduceScatter`](Self::ReduceScatter) of parts of any sizes.
    ReduceScatterV = "HcclReduceScatterV", Parts, Whole, Nothing;
    /// Hands out the root's parts.
    Scatter = "HcclScatter", Parts, Whole, Sends;
    /// Exchanges parts between each two ranks.
    AlltoAll = "HcclAlltoAll", Parts, Parts, Nothing;
    /// [`AlltoAll`](Self::AlltoAll) of parts of any sizes at any places.
    AlltoAllV = "HcclAlltoAllV", Parts, Parts, Nothing;
    /// [`AlltoAll`](Self::AlltoAll) of parts of any sizes without gaps.
    AlltoAllVC = "HcclAlltoAllVC", Parts, Parts, Nothing;
}

impl Collective {
    /// Whether a product has the collective.
    pub const fn runs_on(self, soc: Soc) -> bool {
        let rare = matches!(self, Collective::Reduce | Collective::Broadcast | Collective::Scatter);
        !(rare && matches!(soc, Soc::AtlasInference))
    }

    /// Whether the send buffer must be another one than the receive buffer.
    pub const fn forbids_in_place(self) -> bool {
        use Collective as C;
        matches!(self, C::AllGatherV | C::ReduceScatterV | C::AlltoAll | C::AlltoAllV | C::AlltoAllVC)
    }
}

/// How elements of several ranks become one, by CANN's numbers (`HcclReduceOp`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// The sum.
    Sum = 0,
    /// The product.
    Prod = 1,
    /// The largest.
    Max = 2,
    /// The smallest.
    Min = 3,
}

impl Reduction {
    /// Every reduction, in the order of the numbers.
    pub const ALL: [Reduction; 4] = [Reduction::Sum, Reduction::Prod, Reduction::Max, Reduction::Min];

    /// CANN's number (`HcclReduceOp`).
    pub const fn hccl_number(self) -> u32 {
        self as u32
    }

    /// CANN's name without `HCCL_REDUCE_`.
    pub const fn name(self) -> &'static str {
        match self {
            Reduction::Sum => "SUM",
            Reduction::Prod => "PROD",
            Reduction::Max => "MAX",
            Reduction::Min => "MIN",
        }
    }
}

/// Largest number of elements in one count.
pub const MOST_ELEMENTS: u64 = 0x7_FFFF_FFFF;

/// The element types that collectives know, by CANN's numbers (`HcclDataType`).
const TYPES: [(u32, DType); 16] = [
    (0, DType::Int8),
    (1, DType::Int16),
    (2, DType::Int32),
    (3, DType::Float16),
    (4, DType::Float),
    (5, DType::Int64),
    (6, DType::UInt64),
    (7, DType::UInt8),
    (8, DType::UInt16),
    (9, DType::UInt32),
    (10, DType::Double),
    (11, DType::Bf16),
    (14, DType::HiFloat8),
    (15, DType::Float8E4M3Fn),
    (16, DType::Float8E5M2),
    (17, DType::Float8E8M0),
];

/// The element type with a number of `HcclDataType`.
pub fn dtype_of_hccl(number: u32) -> Option<DType> {
    TYPES.iter().find(|(known, _)| *known == number).map(|(_, dtype)| *dtype)
}

/// The number in `HcclDataType` of an element type.
pub fn hccl_number(dtype: DType) -> Option<u32> {
    TYPES.iter().find(|(_, known)| *known == dtype).map(|(number, _)| *number)
}

/// Whether a product moves elements of a type between ranks.
///
/// For Atlas training and Atlas 200I/500 A2, of which the documents do not speak, it answers as for Atlas inference.
pub const fn moves(soc: Soc, dtype: DType) -> bool {
    use DType as D;
    match dtype {
        D::Int8 | D::Int16 | D::Int32 | D::Int64 | D::UInt8 | D::UInt16 | D::UInt32 | D::UInt64 => true,
        D::Float16 | D::Float | D::Double => true,
        D::Bf16 => matches!(soc, Soc::AtlasA2 | Soc::AtlasA3 | Soc::Ascend950),
        D::HiFloat8 | D::Float8E4M3Fn | D::Float8E5M2 | D::Float8E8M0 => matches!(soc, Soc::Ascend950),
        _ => false,
    }
}

/// Whether a product reduces elements of a type between ranks, in this collective.
pub const fn reduces(soc: Soc, collective: Collective, dtype: DType, reduction: Reduction) -> bool {
    use DType as D;
    let large = matches!(soc, Soc::AtlasA2 | Soc::AtlasA3 | Soc::Ascend950);
    let product = matches!(reduction, Reduction::Prod);
    if product && matches!(collective, Collective::ReduceScatterV) && !matches!(soc, Soc::Ascend950) {
        return false;
    }
    match dtype {
        D::Int8 | D::Int32 | D::Float16 | D::Float => true,
        D::Int16 => !product,
        D::Bf16 => large && !product,
        D::Int64 => large,
        D::UInt64 | D::Double => matches!(soc, Soc::Ascend950),
        _ => false,
    }
}

/// One number for a list of numbers, which every rank computes alike. It is no cryptographic hash: of lists that differ
/// by chance one pair in 2 to the power of 64 is expected to have the same number.
pub fn digest(numbers: impl IntoIterator<Item = u64>) -> u64 {
    const FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;
    numbers.into_iter().fold(FACTOR, |digest, number| {
        let mixed = (digest ^ number).wrapping_mul(FACTOR);
        mixed ^ (mixed >> 32)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_types_lead_back() {
        for (number, dtype) in TYPES {
            assert_eq!((dtype_of_hccl(number), hccl_number(dtype)), (Some(dtype), Some(number)));
        }
        // INT128, a gap, and no type.
        for number in [12, 13, 255] {
            assert_eq!(dtype_of_hccl(number), None);
        }
    }

    #[test]
    fn lists_have_numbers_of_their_own() {
        let lists: Vec<Vec<u64>> =
            (0..200).flat_map(|one| (0..9).map(move |len| vec![one; len])).filter(|list| list.len() != 1).collect();
        let mut digests: Vec<u64> = lists.iter().map(|list| digest(list.iter().copied())).collect();
        // Parts of ranks, with how often they were made before.
        digests.extend(
            [&[1, 2][..], &[2, 1], &[0, 1, 2, 3, 0], &[0, 2, 3, 0], &[0, 2, 3, 1]]
                .map(|list| digest(list.iter().copied())),
        );
        digests.sort_unstable();
        digests.dedup();
        // The empty list is there 200 times.
        assert_eq!(digests.len(), 1 + 200 * 7 + 5);
    }

    #[test]
    fn what_is_reduced_is_also_moved() {
        let socs = [Soc::AtlasA2, Soc::AtlasA3, Soc::Ascend950, Soc::AtlasInference, Soc::AtlasTraining];
        for soc in socs {
            for &dtype in DType::ALL {
                for reduction in Reduction::ALL {
                    let reduced = reduces(soc, Collective::AllReduce, dtype, reduction);
                    assert!(!reduced || moves(soc, dtype), "{soc} {dtype:?}");
                }
            }
        }
        let v = |soc| reduces(soc, Collective::ReduceScatterV, DType::Float, Reduction::Prod);
        assert!(!v(Soc::AtlasA2) && v(Soc::Ascend950));
        assert!(!Collective::Broadcast.runs_on(Soc::AtlasInference) && Collective::Broadcast.runs_on(Soc::AtlasA2));
    }
}
