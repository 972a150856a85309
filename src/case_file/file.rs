//! Reading and writing case files.

use std::collections::BTreeMap;
use std::path::Path;

use ascend_spec::fia::Version;
use ascend_spec::operator::Kind;
use ascend_spec::{Cann, DType};

use super::header::{self, Header};
use super::read_file::read_file;
use super::tensor::{CaseTensor, from_file, stored_name, stored_type, to_file};
use super::values::{self, integer, number};
use super::write_file::write_file;
use super::{Case, CaseError, Expect, MaskKind, Parameter, Tolerance};

const FORMAT: &str = "ascend-attention-case";
const VERSION: &str = "1";
/// What the keys begin with that give the element types of tensors stored as U8.
const STORED: &str = "dtype.";

impl Case {
    /// Most bytes of a case file.
    pub const MOST_BYTES: u64 = 1 << 32;

    /// Reads a case file.
    ///
    /// # Errors
    /// [`CaseError`]: the file cannot be read, has more than [`MOST_BYTES`](Self::MOST_BYTES), is no case, or has something that this crate does not know.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, CaseError> {
        Self::from_bytes(&read_file(path, Self::MOST_BYTES)?)
    }

    /// Writes a case file, as [`write_file`](super::write_file) does. Equal cases make equal files.
    ///
    /// # Errors
    /// As [`Case::to_bytes`], and [`CaseError::Io`].
    pub fn write(&self, path: impl AsRef<Path>) -> Result<(), CaseError> {
        write_file(path, &self.to_bytes()?)
    }

    /// Reads a case from the content of a file.
    ///
    /// # Errors
    /// [`CaseError`]: the content is no case, or has something that this crate does not know.
    pub fn from_bytes(file: &[u8]) -> Result<Self, CaseError> {
        let header = Header::read(file)?;
        let mut case = Self::default();
        let mut stored = case.read_metadata(&header.metadata)?;
        let (mut keys, mut values) = (BTreeMap::new(), BTreeMap::new());
        for (name, info) in &header.tensors {
            let dtype = from_file(info.dtype).ok_or_else(|| CaseError::Dtype {
                tensor: name.clone(),
                dtype: format!("{:?}", info.dtype),
            })?;
            let wrong = |allowed: &str| CaseError::Shape {
                tensor: name.clone(),
                given: format!("shape {:?}", info.shape),
                allowed: allowed.to_owned(),
            };
            let bytes = header.bytes(file, info).to_vec();
            let tensor = CaseTensor::new(dtype, &info.shape, bytes)
                .map_err(|_| wrong("at most 8 axes, each below 2^63"))?;
            let tensor = match stored.of(name) {
                None => tensor,
                Some(of) if dtype == DType::UInt8 => tensor
                    .unpacked(of)
                    .ok_or_else(|| wrong("a last axis, along which two elements share a byte"))?,
                Some(_) => {
                    return Err(CaseError::Contradiction(
                        "a tensor with a key `dtype.` is stored as U8: store it so, or leave the key out",
                    ));
                }
            };
            if let Some(index) = list_index(name, "key") {
                keys.insert(index, tensor);
            } else if let Some(index) = list_index(name, "value") {
                values.insert(index, tensor);
            } else if name == "attention_out" {
                case.attention_out = Some(tensor);
            } else if name == "softmax_lse" {
                case.softmax_lse = Some(tensor);
            } else if let Some(parameter) =
                Parameter::from_name(name).filter(|known| known.info().kind == Kind::Tensor)
            {
                case.arguments.set_tensor(parameter, tensor);
            } else {
                return Err(CaseError::UnknownTensor(name.clone()));
            }
        }
        stored.all_there()?;
        case.arguments.key = list("key", keys)?;
        case.arguments.value = list("value", values)?;
        let kind_given = header
            .metadata
            .iter()
            .any(|(key, _)| key == "atten_mask_kind");
        if !kind_given && case.tensor(Parameter::AttenMask).is_some() {
            case.mask = MaskKind::Tensor;
        }
        case.consistent()?;
        Ok(case)
    }

    /// Takes over the metadata; what it says about the element types of tensors is returned.
    fn read_metadata(&mut self, metadata: &[(String, String)]) -> Result<Stored, CaseError> {
        let find = |key: &'static str| {
            let entry = metadata.iter().find(|(name, _)| name == key);
            entry
                .map(|(_, value)| value.clone())
                .ok_or(CaseError::MissingKey(key))
        };
        // The three that say what the others mean come first.
        if let Some(format) = Some(find("format")?).filter(|format| format != FORMAT) {
            return Err(CaseError::UnknownFormat(format));
        }
        if let Some(version) = Some(find("version")?).filter(|version| version != VERSION) {
            return Err(CaseError::UnknownVersion(version));
        }
        if let Some(op) = Some(find("op")?).filter(|op| op != Self::OP) {
            return Err(CaseError::UnknownOp(op));
        }
        let (mut reject, mut status, mut atol, mut rtol) = (false, None, None, None);
        let mut stored = Stored::default();
        for (key, value) in metadata {
            match key.as_str() {
                "format" | "version" | "op" => {}
                "name" => self.name.clone_from(value),
                "note" => self.note.clone_from(value),
                "atten_mask_kind" => self.mask = mask_kind(value)?,
                "rms_rtol" => self.rms_rtol = Some(distance("rms_rtol", value)?),
                "soc" => self.soc_name = Some(value.clone()),
                "cann" => self.cann = Some(release("cann", value)?),
                "portable_since" => {
                    self.portable_since = Some(release("portable_since", value)?);
                }
                "expect_rule" => self.expect_rule = Some(value.clone()),
                "op_version" => self.op_version = Some(op_version(value)?),
                "out_dtype" => self.out_dtype = Some(out_dtype(value)?),
                "atol" => atol = Some(distance("atol", value)?),
                "rtol" => rtol = Some(distance("rtol", value)?),
                "expect" => {
                    reject = match value.as_str() {
                        "ok" => false,
                        "reject" => true,
                        _ => return Err(CaseError::malformed("expect", value, "`ok` or `reject`")),
                    };
                }
                "expect_status" => {
                    let number = integer("expect_status", value)?;
                    let code = i32::try_from(number).map_err(|_| {
                        CaseError::malformed("expect_status", value, "an integer of 32 bits")
                    })?;
                    status = Some(code);
                }
                "prefix" => {
                    return Err(CaseError::ForeignKey {
                        key: key.clone(),
                        op: Self::OP,
                    });
                }
                _ if values::read(&mut self.arguments, key, value)? => {}
                _ => match key.strip_prefix(STORED) {
                    Some(tensor) => stored.says(tensor, value)?,
                    None => return Err(CaseError::UnknownKey(key.clone())),
                },
            }
        }
        if atol.is_some() || rtol.is_some() {
            self.tolerance = Some(Tolerance {
                atol: atol.unwrap_or(0.0),
                rtol: rtol.unwrap_or(0.0),
            });
        }
        self.expect = match (reject, status) {
            (true, status) => Expect::Reject { status },
            (false, None) => Expect::Ok,
            (false, Some(_)) => {
                return Err(CaseError::Contradiction(
                    "there is an `expect_status`, but `expect` is not `reject`: leave it out, or expect the refusal",
                ));
            }
        };
        Ok(stored)
    }

    /// The content of a file of this case.
    ///
    /// # Errors
    /// [`CaseError`]: the parts do not fit together, a number is not finite, or safetensors lacks an element type.
    pub fn to_bytes(&self) -> Result<Vec<u8>, CaseError> {
        self.consistent()?;
        self.writable()?;
        let stored = self.stored();
        let mut metadata = BTreeMap::from([
            ("format", FORMAT.to_owned()),
            ("version", VERSION.to_owned()),
            ("op", Self::OP.to_owned()),
            ("atten_mask_kind", self.mask.name().to_owned()),
        ]);
        for (key, text) in [("name", &self.name), ("note", &self.note)] {
            if !text.is_empty() {
                metadata.insert(key, text.clone());
            }
        }
        values::write(&self.arguments, &mut metadata);
        if let Some(Tolerance { atol, rtol }) = self.tolerance {
            for (key, value) in [("atol", atol), ("rtol", rtol)] {
                let text = format!("{value:?}");
                distance(key, &text)?;
                metadata.insert(key, text);
            }
        }
        let target = [
            ("soc", self.soc_name.clone()),
            ("cann", self.cann.map(|cann| format!("{cann}.0"))),
            ("op_version", self.op_version.map(version_number)),
            ("expect_rule", self.expect_rule.clone()),
            (
                "portable_since",
                self.portable_since.map(|cann| format!("{cann}.0")),
            ),
            ("out_dtype", self.out_dtype.map(dtype_name)),
            ("rms_rtol", self.rms_rtol.map(|rtol| format!("{rtol:?}"))),
        ];
        for (key, text) in target {
            metadata.extend(text.map(|text| (key, text)));
        }
        for (key, name) in &stored {
            metadata.insert(key, (*name).to_owned());
        }
        if let Expect::Reject { status } = self.expect {
            metadata.insert("expect", "reject".to_owned());
            if let Some(status) = status {
                metadata.insert("expect_status", status.to_string());
            }
        }
        let mut tensors = BTreeMap::new();
        let named: Vec<_> = self
            .named_tensors()
            .into_iter()
            .map(|(name, tensor)| (name, tensor, tensor.stored_shape()))
            .collect();
        for (name, tensor, shape) in &named {
            let (Some(dtype), Some(shape)) = (file_type(tensor.dtype()), shape) else {
                return Err(unstorable(name, tensor));
            };
            tensors.insert(name.clone(), (dtype, &**shape, tensor.bytes()));
        }
        header::write(&metadata, &tensors)
    }

    /// Refuses what a file cannot hold: a scale that is no number, element types that safetensors lacks.
    pub(super) fn writable(&self) -> Result<(), CaseError> {
        number("scale", &format!("{:?}", self.arguments.scale))?;
        if let Some(rtol) = self.rms_rtol {
            distance("rms_rtol", &format!("{rtol:?}"))?;
        }
        for (name, tensor) in self.named_tensors() {
            let whole = tensor.stored_shape().is_some_and(|shape| {
                let bits = file_type(tensor.dtype()).map(|dtype| dtype.bitsize());
                let elements =
                    |of: usize| shape.iter().try_fold(of, |n, size| n.checked_mul(*size));
                // The format has no padding bits behind the last element.
                bits.and_then(elements)
                    .is_some_and(|bits| bits.is_multiple_of(8))
            });
            if !whole {
                return Err(unstorable(&name, tensor));
            }
        }
        Ok(())
    }

    /// The metadata that says what tensors stored as U8 hold: keys and element types. A list whose elements agree has one.
    fn stored(&self) -> Vec<(String, &'static str)> {
        let mut stored = Vec::new();
        let named = self.named_tensors();
        for (name, tensor) in &named {
            let Some(of) = stored_name(tensor.dtype()) else {
                continue;
            };
            let list = list_of(name);
            let mut elements = named.iter().filter(|(other, _)| list_of(other) == list);
            let alike = elements.all(|(_, other)| other.dtype() == tensor.dtype());
            let label = if alike { list } else { name };
            stored.push((format!("{STORED}{label}"), of));
        }
        stored.dedup();
        stored
    }

    /// Every tensor of the file and its name there.
    fn named_tensors(&self) -> Vec<(String, &CaseTensor)> {
        let mut named = Vec::new();
        for (argument, tensor) in self.arguments.each_tensor() {
            let several = self.arguments.tensors(argument.parameter).len() > 1;
            named.push(match several {
                true => (format!("{}.{}", argument.name(), argument.index), tensor),
                false => (argument.name().to_owned(), tensor),
            });
        }
        for (tensor, name) in [
            (&self.attention_out, "attention_out"),
            (&self.softmax_lse, "softmax_lse"),
        ] {
            named.extend(tensor.as_ref().map(|tensor| (name.to_owned(), tensor)));
        }
        named
    }
}

/// What the metadata says about the element types of tensors that the file stores as U8.
#[derive(Default)]
struct Stored {
    /// Tensor or list, element type, and whether there is such a tensor.
    entries: Vec<(String, DType, bool)>,
}

impl Stored {
    fn says(&mut self, tensor: &str, value: &str) -> Result<(), CaseError> {
        let dtype = stored_type(value).ok_or_else(|| {
            CaseError::malformed(
                "dtype.<tensor>",
                value,
                "`int4`, `float4_e2m1`, `float8_e4m3fn`, `float8_e8m0` or `hifloat8`",
            )
        })?;
        self.entries.push((tensor.to_owned(), dtype, false));
        Ok(())
    }

    /// The element type of a tensor; a key of its own goes before that of its list.
    fn of(&mut self, tensor: &str) -> Option<DType> {
        let mut found = None;
        for label in [list_of(tensor), tensor] {
            for (name, dtype, there) in &mut self.entries {
                if name == label {
                    *there = true;
                    found = Some(*dtype);
                }
            }
        }
        found
    }

    /// Refuses a key of a tensor that the file does not have.
    fn all_there(&self) -> Result<(), CaseError> {
        match self.entries.iter().find(|(.., there)| !there) {
            None => Ok(()),
            Some((name, ..)) => Err(CaseError::UnknownKey(format!("{STORED}{name}"))),
        }
    }
}

/// The list that a tensor is an element of, `key` for `key.3`; of others their own name.
fn list_of(tensor: &str) -> &str {
    tensor.split_once('.').map_or(tensor, |(list, _)| list)
}

/// The file's element type for one of CANN's.
fn file_type(dtype: DType) -> Option<safetensors::Dtype> {
    match stored_name(dtype) {
        Some(_) => Some(safetensors::Dtype::U8),
        None => to_file(dtype),
    }
}

fn unstorable(name: &str, tensor: &CaseTensor) -> CaseError {
    CaseError::Dtype {
        tensor: name.to_owned(),
        dtype: format!("{tensor:?}"),
    }
}

impl MaskKind {
    /// Its name in a file.
    const fn name(self) -> &'static str {
        match self {
            MaskKind::None => "none",
            MaskKind::Tensor => "tensor",
            MaskKind::Compressed => "compressed",
        }
    }
}

fn mask_kind(value: &str) -> Result<MaskKind, CaseError> {
    [MaskKind::None, MaskKind::Tensor, MaskKind::Compressed]
        .into_iter()
        .find(|kind| kind.name() == value)
        .ok_or_else(|| {
            CaseError::malformed("atten_mask_kind", value, "`none`, `tensor` or `compressed`")
        })
}

fn release(key: &'static str, value: &str) -> Result<Cann, CaseError> {
    value.parse().map_err(|_| {
        CaseError::malformed(key, value, "a release whose contract is known: 8.1 to 9.1")
    })
}

/// The number in a version's name.
fn version_number(version: Version) -> String {
    version.to_string().trim_start_matches('V').to_owned()
}

fn op_version(value: &str) -> Result<Version, CaseError> {
    let named = |version: &Version| version_number(*version) == value;
    Version::ALL
        .into_iter()
        .find(named)
        .ok_or_else(|| CaseError::malformed("op_version", value, "1 to 5"))
}

/// The name of an element type in the metadata.
fn dtype_name(dtype: DType) -> String {
    match dtype {
        DType::Bf16 => "bfloat16".to_owned(),
        _ => dtype.name().to_lowercase(),
    }
}

fn out_dtype(value: &str) -> Result<DType, CaseError> {
    let named = |dtype: &&DType| dtype_name(**dtype) == value;
    DType::ALL
        .iter()
        .find(named)
        .copied()
        .ok_or_else(|| CaseError::malformed("out_dtype", value, "an element type, such as `int8`"))
}

fn distance(key: &'static str, value: &str) -> Result<f64, CaseError> {
    let number = number(key, value)?;
    if number < 0.0 {
        return Err(CaseError::malformed(key, value, "a number of at least 0"));
    }
    Ok(number)
}

/// The place in the list `list` of the tensor `name`: `None` for `key`, `Some(3)` for `key.3`. The outer `None` means
/// another tensor.
fn list_index(name: &str, list: &str) -> Option<Option<usize>> {
    let rest = name.strip_prefix(list)?;
    if rest.is_empty() {
        return Some(None);
    }
    let digits = rest.strip_prefix('.')?;
    let index: usize = digits.parse().ok()?;
    // One spelling a number: neither `+1` nor `01`.
    (index.to_string() == digits).then_some(Some(index))
}

/// The tensors of a list, from the places that the file names.
fn list(
    name: &'static str,
    mut found: BTreeMap<Option<usize>, CaseTensor>,
) -> Result<Vec<CaseTensor>, CaseError> {
    if let Some(single) = found.remove(&None) {
        return match found.is_empty() {
            true => Ok(vec![single]),
            false => Err(CaseError::Contradiction(match name {
                "key" => {
                    "there are both `key` and `key.0`, `key.1`, ...: one tensor is `key`, a list has numbers"
                }
                _ => {
                    "there are both `value` and `value.0`, `value.1`, ...: one tensor is `value`, a list has numbers"
                }
            })),
        };
    }
    for (place, index) in found.keys().enumerate() {
        if *index != Some(place) {
            return Err(CaseError::MissingTensor(format!("{name}.{place}")));
        }
    }
    Ok(found.into_values().collect())
}
