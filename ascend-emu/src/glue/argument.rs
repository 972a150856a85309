//! A tensor of a call, and the checks on it.

use super::number::{Domain, NAMES, Number};
use crate::operator::TensorPosition;
use crate::status::{ACLNN_INVALID, Failure, Outcome, failure};
use ascend_spec::{DType, TensorDesc};
use smallvec::SmallVec;
use std::fmt::Display;

/// Sizes of the axes of a tensor that was checked to have a countable number of elements.
pub(super) type Shape = SmallVec<[usize; 8]>;

/// Largest number of elements of a tensor, axes of size 0 left out. This is a choice of the emulator: views that
/// repeat elements, or that have none, can claim more elements than a loop could visit.
const MOST: usize = 1 << 32;

/// How an operator uses a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Read,
    Write,
    /// Reads it, then writes it.
    Update,
}

/// One tensor of a call, whose address each launch may change.
#[derive(Clone, Copy, Debug)]
pub(super) struct Argument {
    pub operator: &'static str,
    pub name: &'static str,
    pub desc: TensorDesc,
    /// Position among all tensors of the call.
    pub index: usize,
    pub position: TensorPosition,
    pub role: Role,
    /// The tensor's handle when the call was prepared; 0 for inputs, whose handles are not used.
    pub handle: usize,
}

impl Argument {
    /// A refusal that names the operator and this parameter.
    pub(super) fn refuse(&self, value: impl Display, allowed: impl Display) -> Failure {
        refuse(self.operator, self.name, value, allowed)
    }

    /// Whether a launch writes only the parts that indices or flags name, and reports these itself.
    pub(super) fn writes_parts(&self) -> bool {
        self.role != Role::Read
            && ["aclnnIndexPutImpl", "aclnnInplaceIndexCopy", "aclnnKvRmsNormRopeCache", "aclnnScatterNdUpdate"]
                .contains(&self.operator)
    }

    /// Checks what every tensor must satisfy. INT4 is allowed where elements may be packed.
    pub(super) fn check(&self, packed: bool) -> Outcome {
        let desc = &self.desc;
        let packed = packed && desc.dtype == DType::Int4;
        if desc.dtype.size().is_none() && !packed {
            return Err(self.refuse(desc.dtype, NAMES));
        }
        if !desc.format.is_plain() {
            return Err(self.refuse(format_args!("format {}", desc.format), "a plain format such as ND"));
        }
        if !desc.is_countable() || desc.byte_range().is_none() {
            return Err(self.refuse(desc, "a view of memory that can exist"));
        }
        let sizes = self.shape().into_iter().filter(|&size| size > 0);
        let visited = sizes.fold(1_usize, usize::saturating_mul);
        if visited > MOST {
            let along = match desc.is_empty() {
                true => " along the axes that have some",
                false => "",
            };
            return Err(self.refuse(format_args!("{visited} elements{along}"), format_args!("at most {MOST}")));
        }
        Ok(())
    }

    pub(super) fn dtype(&self) -> DType {
        self.desc.dtype
    }

    /// The sizes of the axes, which [`Argument::check`] has found not to be negative.
    pub(super) fn shape(&self) -> Shape {
        let size = |&dim: &i64| usize::try_from(dim).unwrap_or(0);
        self.desc.shape.iter().map(size).collect()
    }

    pub(super) fn rank(&self) -> usize {
        self.desc.shape.rank()
    }

    pub(super) fn elements(&self) -> usize {
        self.shape().iter().product()
    }

    /// The domain that the elements are computed in.
    pub(super) fn domain(&self) -> Outcome<Domain> {
        Domain::of(self.dtype()).ok_or_else(|| self.refuse(self.dtype(), NAMES))
    }

    /// The number of an axis, counted from the end if `dim` is negative. A tensor without axes counts as one with a
    /// single axis.
    pub(super) fn axis(&self, parameter: &str, dim: i64) -> Outcome<usize> {
        axis_of(self.operator, parameter, dim, self.rank())
    }

    /// Refuses a tensor whose shape is not `shape`.
    pub(super) fn expect_shape(&self, shape: &[usize]) -> Outcome {
        if self.shape().as_slice() == shape {
            Ok(())
        } else {
            Err(self.refuse(self.desc.shape, format_args!("{shape:?}")))
        }
    }

    /// Refuses an output of a reduction whose shape is not `shape`. As in CANN, two shapes of one element are equal.
    pub(super) fn expect_reduced(&self, shape: &[usize]) -> Outcome {
        let one = self.elements() == 1 && shape.iter().all(|&size| size == 1);
        if one { Ok(()) } else { self.expect_shape(shape) }
    }

    /// Refuses a tensor that cannot be broadcast to a shape.
    pub(super) fn expect_broadcast(&self, shape: &[usize]) -> Outcome {
        if broadcast(&self.shape(), shape).is_some_and(|common| common.as_slice() == shape) {
            Ok(())
        } else {
            Err(self.refuse(self.desc.shape, format_args!("what broadcasts to {shape:?}")))
        }
    }

    /// Refuses a tensor whose rank is not `rank`.
    pub(super) fn expect_rank(&self, rank: usize) -> Outcome {
        if self.rank() == rank {
            Ok(())
        } else {
            Err(self.refuse(self.desc.shape, format_args!("{rank} dimension{}", if rank == 1 { "" } else { "s" })))
        }
    }

    /// Refuses a tensor whose elements are not of a type for positions.
    pub(super) fn expect_index(&self) -> Outcome {
        if matches!(self.dtype(), DType::Int32 | DType::Int64) {
            Ok(())
        } else {
            Err(self.refuse(self.dtype(), "INT64, INT32"))
        }
    }

    /// Refuses a tensor whose elements share memory, by PyTorch's test: an axis that repeats its elements.
    pub(super) fn expect_apart(&self) -> Outcome {
        let mut axes = self.desc.shape.iter().zip(self.desc.strides.iter());
        let repeats = axes.any(|(&size, &stride)| size > 1 && stride == 0);
        match repeats && !self.desc.is_empty() {
            true => {
                Err(self
                    .refuse(self.desc, "a tensor that is written in place, with one place in memory for each element"))
            }
            false => Ok(()),
        }
    }

    /// Refuses a tensor whose element type is not `dtype`.
    pub(super) fn expect_dtype(&self, dtype: DType) -> Outcome {
        if self.dtype() == dtype { Ok(()) } else { Err(self.refuse(self.dtype(), dtype)) }
    }

    /// Refuses an output if elements of another tensor cannot be converted to its type. Equal types need no
    /// conversion.
    pub(super) fn expect_convertible(&self, from: &Argument) -> Outcome {
        if self.dtype() != from.dtype() {
            from.domain()?;
            self.domain()?;
        }
        Ok(())
    }
}

/// A refusal that names the operator and a parameter.
pub(super) fn refuse(operator: &str, parameter: &str, value: impl Display, allowed: impl Display) -> Failure {
    failure!(ACLNN_INVALID, "{operator}: {parameter}: given {value}, allowed: {allowed}")
}

/// The number of an axis of a tensor of rank `rank`, counted from the end if `dim` is negative; 0 if the rank is 0.
pub(super) fn axis_of(operator: &str, parameter: &str, dim: i64, rank: usize) -> Outcome<usize> {
    let count = rank.max(1) as i64;
    let axis = if dim < 0 { dim.saturating_add(count) } else { dim };
    usize::try_from(axis)
        .ok()
        .filter(|&axis| axis < rank.max(1))
        .ok_or_else(|| refuse(operator, parameter, dim, format_args!("{} to {}", -count, count - 1)))
}

/// The shape that two shapes broadcast to.
pub(super) fn broadcast(a: &[usize], b: &[usize]) -> Option<Shape> {
    let rank = a.len().max(b.len());
    let size = |shape: &[usize], axis: usize| {
        (axis + shape.len()).checked_sub(rank).and_then(|axis| shape.get(axis)).copied().unwrap_or(1)
    };
    (0..rank)
        .map(|axis| match (size(a, axis), size(b, axis)) {
            (a, b) if a == b => Some(a),
            (1, b) => Some(b),
            (a, 1) => Some(a),
            _ => None,
        })
        .collect()
}

/// The shape that tensors broadcast to.
pub(super) fn common_shape(arguments: &[Argument]) -> Outcome<Shape> {
    let mut common = Shape::new();
    for argument in arguments {
        let shape = argument.shape();
        common = broadcast(&common, &shape).ok_or_else(|| {
            argument.refuse(argument.desc.shape, format_args!("what broadcasts together with {common:?}"))
        })?;
    }
    Ok(common)
}

/// The domain in which tensors and scalars are computed together.
pub(super) fn common_domain(arguments: &[Argument], numbers: &[Number]) -> Outcome<Domain> {
    let mut domain = Domain::Int;
    for argument in arguments {
        domain = domain.with(argument.domain()?);
    }
    Ok(numbers.iter().fold(domain, |domain, number| domain.with(number.domain())))
}

/// Checks that inputs have the shape of the output after broadcasting. An input that is the output keeps its shape.
pub(super) fn check_shapes(inputs: &[Argument], out: &Argument) -> Outcome {
    let common = common_shape(inputs)?;
    out.expect_shape(&common)
}
