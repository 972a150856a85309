//! Tensors of a case, in host memory.

use ascend_spec::minifloat::{Float8E4M3Fn, Float8E8M0, HiFloat8};
use ascend_spec::{DType, Dims, TensorDesc};
use half::{bf16, f16};
use safetensors::Dtype;

use super::error::CaseError;

/// The pairs of element types that mean the same in safetensors and in CANN.
const DTYPES: [(Dtype, DType); 19] = [
    (Dtype::BOOL, DType::Bool),
    (Dtype::U8, DType::UInt8),
    (Dtype::I8, DType::Int8),
    (Dtype::I16, DType::Int16),
    (Dtype::U16, DType::UInt16),
    (Dtype::F16, DType::Float16),
    (Dtype::BF16, DType::Bf16),
    (Dtype::I32, DType::Int32),
    (Dtype::U32, DType::UInt32),
    (Dtype::F32, DType::Float),
    (Dtype::F64, DType::Double),
    (Dtype::I64, DType::Int64),
    (Dtype::U64, DType::UInt64),
    (Dtype::C64, DType::Complex64),
    (Dtype::F8_E5M2, DType::Float8E5M2),
    (Dtype::F8_E4M3, DType::Float8E4M3Fn),
    (Dtype::F8_E8M0, DType::Float8E8M0),
    (Dtype::F6_E2M3, DType::Float6E2M3),
    (Dtype::F6_E3M2, DType::Float6E3M2),
];

/// CANN's type for one of the file's.
pub(super) fn from_file(dtype: Dtype) -> Option<DType> {
    let pair = DTYPES.iter().find(|(file, _)| *file == dtype);
    pair.map(|&(_, cann)| cann)
}

/// The file's type for one of CANN's.
pub(super) fn to_file(dtype: DType) -> Option<Dtype> {
    let pair = DTYPES.iter().find(|(_, cann)| *cann == dtype);
    pair.map(|&(file, _)| file)
}

/// Element types that files store as U8, with the names that the metadata gives them.
const STORED_AS_BYTES: [(&str, DType); 5] = [
    ("int4", DType::Int4),
    ("float4_e2m1", DType::Float4E2M1),
    ("float8_e4m3fn", DType::Float8E4M3Fn),
    ("float8_e8m0", DType::Float8E8M0),
    ("hifloat8", DType::HiFloat8),
];

/// The name of an element type that files store as U8; `None` for one that they name themselves.
pub(super) fn stored_name(dtype: DType) -> Option<&'static str> {
    let pair = STORED_AS_BYTES.iter().find(|(_, cann)| *cann == dtype);
    pair.map(|&(name, _)| name)
}

/// The element type that files store as U8 under a name.
pub(super) fn stored_type(name: &str) -> Option<DType> {
    let pair = STORED_AS_BYTES.iter().find(|(known, _)| *known == name);
    pair.map(|&(_, cann)| cann)
}

/// A contiguous tensor in host memory: element type, shape, and little-endian bytes that fit them.
#[derive(Clone, PartialEq, Eq)]
pub struct CaseTensor {
    dtype: DType,
    shape: Vec<usize>,
    dims: Dims,
    bytes: Vec<u8>,
}

#[cold]
fn misshapen(dtype: DType, shape: &(impl std::fmt::Debug + ?Sized), bytes: &[u8], allowed: String) -> CaseError {
    CaseError::Shape {
        tensor: dtype.name().to_owned(),
        given: format!("shape {shape:?} and {} bytes", bytes.len()),
        allowed,
    }
}

impl CaseTensor {
    /// A tensor of these bytes, row-major.
    ///
    /// # Errors
    /// [`CaseError::Shape`] if the shape has more than eight axes or one beyond INT64, or needs another number of
    /// bytes.
    pub fn new(dtype: DType, shape: &[usize], bytes: Vec<u8>) -> Result<Self, CaseError> {
        let sizes = shape.iter().map(|size| i64::try_from(*size).ok());
        let sizes: Option<Vec<i64>> = sizes.collect();
        match sizes.and_then(|sizes| Dims::new(&sizes)) {
            Some(dims) => Self::with_dims(dtype, dims, bytes),
            None => {
                Err(misshapen(dtype, shape, &bytes, format!("at most {} axes of at most {}", Dims::MAX_RANK, i64::MAX)))
            }
        }
    }

    /// As [`CaseTensor::new`], but with the axes as the operator counts them.
    pub(crate) fn with_dims(dtype: DType, dims: Dims, bytes: Vec<u8>) -> Result<Self, CaseError> {
        let shape = dims.iter().map(|size| usize::try_from(*size).ok());
        let shape: Option<Vec<usize>> = shape.collect();
        let needed = dims.elements().and_then(|count| dtype.bytes_for(count));
        match shape.zip(needed) {
            None => {
                let allowed = "axes of at least 0 whose product fits in memory";
                Err(misshapen(dtype, &dims, &bytes, allowed.to_owned()))
            }
            Some((shape, needed)) if usize::try_from(needed) != Ok(bytes.len()) => {
                let allowed = format!("{needed} bytes for this shape");
                Err(misshapen(dtype, &shape, &bytes, allowed))
            }
            Some((shape, _)) => Ok(Self { dtype, shape, dims, bytes }),
        }
    }

    /// A tensor of these numbers, each rounded to the nearest number of `dtype`. Ties go to the even number, in
    /// HIFLOAT8 to the one away from 0, in FLOAT8_E8M0 to the larger one. Integers saturate; BOOL is whether a number
    /// is not 0.
    ///
    /// # Errors
    /// [`CaseError::Dtype`] for a type other than FLOAT, FLOAT16, BF16, DOUBLE, INT8, UINT8, BOOL, INT32, INT64,
    /// FLOAT8_E4M3FN, HIFLOAT8 or FLOAT8_E8M0;
    /// [`CaseError::Shape`] if the shape needs another number of elements.
    pub fn from_f32(dtype: DType, shape: &[usize], values: &[f32]) -> Result<Self, CaseError> {
        let each = |encode: &dyn Fn(f32) -> Vec<u8>| values.iter().flat_map(|&v| encode(v)).collect();
        let bytes: Vec<u8> = match dtype {
            DType::Float => each(&|v| v.to_le_bytes().to_vec()),
            DType::Float16 => each(&|v| f16::from_f32(v).to_le_bytes().to_vec()),
            DType::Bf16 => each(&|v| bf16::from_f32(v).to_le_bytes().to_vec()),
            DType::Double => each(&|v| f64::from(v).to_le_bytes().to_vec()),
            DType::Int8 => each(&|v| (v.round_ties_even() as i8).to_le_bytes().to_vec()),
            DType::UInt8 => each(&|v| vec![v.round_ties_even() as u8]),
            DType::Bool => each(&|v| vec![u8::from(v != 0.0)]),
            DType::Int32 => each(&|v| (v.round_ties_even() as i32).to_le_bytes().to_vec()),
            DType::Int64 => each(&|v| (v.round_ties_even() as i64).to_le_bytes().to_vec()),
            DType::Float8E4M3Fn => each(&|v| vec![Float8E4M3Fn::from_f32(v).to_bits()]),
            DType::HiFloat8 => each(&|v| vec![HiFloat8::from_f32(v).to_bits()]),
            DType::Float8E8M0 => each(&|v| vec![Float8E8M0::from_f32(v).to_bits()]),
            other => {
                return Err(CaseError::Dtype { tensor: "from_f32".to_owned(), dtype: other.to_string() });
            }
        };
        Self::new(dtype, shape, bytes)
    }

    /// Reinterprets the bytes of a U8 tensor as elements of `dtype`: one element a byte, or two along the last axis.
    /// `None` for a tensor without axes where two elements share a byte.
    pub(super) fn unpacked(self, dtype: DType) -> Option<Self> {
        let mut shape = self.shape;
        if dtype.bits() == 4 {
            let last = shape.last_mut()?;
            *last = last.checked_mul(2)?;
        }
        Self::new(dtype, &shape, self.bytes).ok()
    }

    /// The tensor's shape in a file: where two elements share a byte, the shape of the bytes. `None` if the last axis
    /// is odd then, so that a byte would hold elements of two rows.
    pub(super) fn stored_shape(&self) -> Option<Vec<usize>> {
        let mut shape = self.shape.clone();
        if self.dtype.bits() == 4 {
            let last = shape.last_mut().filter(|last| **last % 2 == 0)?;
            *last /= 2;
        }
        Some(shape)
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The elements, row-major and little-endian.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The elements for writing; their number cannot change.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// The descriptor of this tensor.
    pub fn desc(&self) -> TensorDesc {
        TensorDesc::packed(self.dtype, self.dims)
    }

    /// The elements as integers, for INT32 and INT64; `None` for other types.
    pub fn to_i64(&self) -> Option<Vec<i64>> {
        let (quads, _) = self.bytes.as_chunks::<4>();
        let (octets, _) = self.bytes.as_chunks::<8>();
        match self.dtype {
            DType::Int32 => {
                let ints = quads.iter().map(|&b| i64::from(i32::from_le_bytes(b)));
                Some(ints.collect())
            }
            DType::Int64 => Some(octets.iter().map(|&b| i64::from_le_bytes(b)).collect()),
            DType::Int8 => Some(self.bytes.iter().map(|&b| i64::from(b as i8)).collect()),
            _ => None,
        }
    }

    /// The elements as numbers, exact for FLOAT, FLOAT16, BF16, INT8, UINT8, BOOL and the floats of 8 bits but
    /// FLOAT8_E5M2; `None` for other types.
    pub fn to_f32(&self) -> Option<Vec<f32>> {
        let (pairs, _) = self.bytes.as_chunks::<2>();
        let (quads, _) = self.bytes.as_chunks::<4>();
        let each = |value: &dyn Fn(u8) -> f32| self.bytes.iter().map(|&b| value(b)).collect();
        Some(match self.dtype {
            DType::Float => quads.iter().map(|&b| f32::from_le_bytes(b)).collect(),
            DType::Float16 => pairs.iter().map(|&b| f16::from_le_bytes(b).to_f32()).collect(),
            DType::Bf16 => pairs.iter().map(|&b| bf16::from_le_bytes(b).to_f32()).collect(),
            DType::Int8 => self.bytes.iter().map(|&b| f32::from(b as i8)).collect(),
            DType::Float8E4M3Fn => each(&|b| Float8E4M3Fn::from_bits(b).to_f32()),
            DType::HiFloat8 => each(&|b| HiFloat8::from_bits(b).to_f32()),
            DType::Float8E8M0 => each(&|b| Float8E8M0::from_bits(b).to_f32()),
            DType::UInt8 | DType::Bool => self.bytes.iter().map(|&b| f32::from(b)).collect(),
            _ => return None,
        })
    }
}

impl std::fmt::Debug for CaseTensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.dtype, self.dims)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_of_types_has_the_same_size_and_is_unique() {
        for (file, cann) in DTYPES {
            assert_eq!(file.bitsize(), cann.bits() as usize, "{file:?}");
            assert_eq!(from_file(file), Some(cann));
            assert_eq!(to_file(cann), Some(file));
        }
        assert_eq!(from_file(Dtype::F8_E4M3FNUZ), None);
        assert_eq!(to_file(DType::Float4E1M2), None);
    }

    #[test]
    fn bytes_must_fit_the_shape() {
        assert!(CaseTensor::new(DType::Float16, &[2, 3], vec![0; 12]).is_ok());
        for (shape, bytes) in
            [(&[2, 3][..], 11), (&[usize::MAX, usize::MAX], 0), (&[1 << 62, 1 << 62], 0), (&[1; 9], 2)]
        {
            let error = CaseTensor::new(DType::Float16, shape, vec![0; bytes]).unwrap_err();
            assert!(matches!(error, CaseError::Shape { .. }), "{error}");
        }
    }

    #[test]
    fn numbers_survive_where_the_type_holds_them() {
        let values = [0.0, 1.0, -2.5, 96.0];
        for dtype in [DType::Float, DType::Float16, DType::Bf16, DType::Float8E4M3Fn] {
            let tensor = CaseTensor::from_f32(dtype, &[4], &values).unwrap();
            assert_eq!(tensor.to_f32().unwrap(), values);
        }
        let rounded = CaseTensor::from_f32(DType::Int8, &[4], &[0.5, 1.5, -2.5, 1e9]).unwrap();
        assert_eq!(rounded.to_f32().unwrap(), [0.0, 2.0, -2.0, 127.0]);
        assert_eq!(rounded.desc().byte_range(), Some(0..4));
        assert!(CaseTensor::from_f32(DType::Int4, &[1], &[0.0]).is_err());
    }
}
