//! The metadata of a case, whatever its operator is.

use std::collections::BTreeMap;

use ascend_spec::declared::DeclaredOperator;
use ascend_spec::{Cann, DType};

use super::stored::Stored;
use super::values::{integer, number};
use super::{CaseError, Expect, MaskKind, Tolerance};

const FORMAT: &str = "ascend-attention-case";
const VERSION: &str = "1";
/// Prefix of the keys that give the element types of tensors stored as U8.
const STORED: &str = "dtype.";

/// The entries that are no arguments of the operator.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Metadata {
    pub(super) name: String,
    pub(super) note: String,
    /// Where the mask comes from, if the file names it.
    pub(super) mask: Option<MaskKind>,
    pub(super) expect: Expect,
    pub(super) tolerance: Option<Tolerance>,
    pub(super) softmax_tolerance: Option<Tolerance>,
    pub(super) rms_rtol: Option<f64>,
    pub(super) soc_name: Option<String>,
    pub(super) cann: Option<Cann>,
    pub(super) op_version: Option<u8>,
    pub(super) expect_rule: Option<String>,
    pub(super) portable_since: Option<Cann>,
    pub(super) out_dtype: Option<DType>,
    pub(super) group: Option<(String, String)>,
}

/// The operator that the metadata of a file names.
pub(super) fn operator(metadata: &[(String, String)]) -> Result<DeclaredOperator, CaseError> {
    let find = |key: &'static str| {
        let entry = metadata.iter().find(|(name, _)| name == key);
        entry
            .map(|(_, value)| value)
            .ok_or(CaseError::MissingKey(key))
    };
    // `format`, `version` and `op` come first: they decide what the other keys mean.
    if let Some(format) = Some(find("format")?).filter(|format| *format != FORMAT) {
        return Err(CaseError::UnknownFormat(format.clone()));
    }
    if let Some(version) = Some(find("version")?).filter(|version| *version != VERSION) {
        return Err(CaseError::UnknownVersion(version.clone()));
    }
    let op = find("op")?;
    DeclaredOperator::from_name(op).ok_or_else(|| CaseError::UnknownOp(op.clone()))
}

impl Metadata {
    /// Reads the entries of a file of this operator. `argument` reads an entry that gives an argument, and returns
    /// false for other entries. Also returns the element types of tensors that are stored as U8.
    pub(super) fn read(
        metadata: &[(String, String)],
        operator: DeclaredOperator,
        mut argument: impl FnMut(&str, &str) -> Result<bool, CaseError>,
    ) -> Result<(Self, Stored), CaseError> {
        let mut read = Self::default();
        let (mut reject, mut status, mut group, mut role) = (false, None, None, None);
        let mut distances = [None; 4];
        let mut stored = Stored::default();
        for (key, value) in metadata {
            if argument(key, value)? {
                continue;
            }
            if !takes(operator, key) {
                return Err(foreign(operator, key));
            }
            match key.as_str() {
                "format" | "version" | "op" => {}
                "name" => read.name.clone_from(value),
                "note" => read.note.clone_from(value),
                "atten_mask_kind" => read.mask = Some(mask_kind(value)?),
                "rms_rtol" => read.rms_rtol = Some(distance("rms_rtol", value)?),
                "soc" => read.soc_name = Some(value.clone()),
                "cann" => read.cann = Some(release("cann", value)?),
                "portable_since" => {
                    read.portable_since = Some(release("portable_since", value)?);
                }
                "expect_rule" => read.expect_rule = Some(value.clone()),
                "op_version" => read.op_version = Some(op_version(operator, value)?),
                "out_dtype" => read.out_dtype = Some(out_dtype(value)?),
                "atol" => distances[0] = Some(distance("atol", value)?),
                "rtol" => distances[1] = Some(distance("rtol", value)?),
                "softmax_atol" => distances[2] = Some(distance("softmax_atol", value)?),
                "softmax_rtol" => distances[3] = Some(distance("softmax_rtol", value)?),
                "group" => group = Some(value.clone()),
                "group_role" => role = Some(value.clone()),
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
                _ => match key.strip_prefix(STORED) {
                    Some(tensor) => stored.says(tensor, value)?,
                    None if is_any_argument(key) => return Err(foreign(operator, key)),
                    None => return Err(CaseError::UnknownKey(key.clone())),
                },
            }
        }
        let tolerance = |atol: Option<f64>, rtol: Option<f64>| {
            atol.or(rtol)?;
            Some(Tolerance {
                atol: atol.unwrap_or(0.0),
                rtol: rtol.unwrap_or(0.0),
            })
        };
        let [atol, rtol, softmax_atol, softmax_rtol] = distances;
        read.tolerance = tolerance(atol, rtol);
        read.softmax_tolerance = tolerance(softmax_atol, softmax_rtol);
        read.group = match (group, role) {
            (None, None) => None,
            (Some(group), Some(role)) => Some((group, role)),
            _ => {
                return Err(CaseError::Contradiction(
                    "`group` and `group_role` go together: give both, or neither",
                ));
            }
        };
        read.expect = match (reject, status) {
            (true, status) => Expect::Reject { status },
            (false, None) => Expect::Ok,
            (false, Some(_)) => {
                return Err(CaseError::Contradiction(
                    "there is an `expect_status`, but `expect` is not `reject`: leave it out, or expect the refusal",
                ));
            }
        };
        Ok((read, stored))
    }

    /// Writes the entries of a file of this operator.
    pub(super) fn write(
        &self,
        operator: DeclaredOperator,
    ) -> Result<BTreeMap<&'static str, String>, CaseError> {
        let mut entries = BTreeMap::from([
            ("format", FORMAT.to_owned()),
            ("version", VERSION.to_owned()),
            ("op", operator.name().to_owned()),
        ]);
        for (key, text) in [("name", &self.name), ("note", &self.note)] {
            if !text.is_empty() {
                entries.insert(key, text.clone());
            }
        }
        for (keys, tolerance) in [
            (["atol", "rtol"], self.tolerance),
            (["softmax_atol", "softmax_rtol"], self.softmax_tolerance),
        ] {
            let Some(Tolerance { atol, rtol }) = tolerance else {
                continue;
            };
            for (key, value) in keys.into_iter().zip([atol, rtol]) {
                entries.insert(key, written(key, value)?);
            }
        }
        if let Some(rtol) = self.rms_rtol {
            entries.insert("rms_rtol", written("rms_rtol", rtol)?);
        }
        let release = |cann: Option<Cann>| cann.map(|cann| format!("{cann}.0"));
        let (group, role) = self.group.clone().unzip();
        for (key, text) in [
            (
                "atten_mask_kind",
                self.mask.map(|mask| mask.name().to_owned()),
            ),
            ("soc", self.soc_name.clone()),
            ("cann", release(self.cann)),
            (
                "op_version",
                self.op_version.map(|number| number.to_string()),
            ),
            ("expect_rule", self.expect_rule.clone()),
            ("portable_since", release(self.portable_since)),
            ("out_dtype", self.out_dtype.map(dtype_name)),
            ("group", group),
            ("group_role", role),
        ] {
            entries.extend(text.map(|text| (key, text)));
        }
        if let Expect::Reject { status } = self.expect {
            entries.insert("expect", "reject".to_owned());
            if let Some(status) = status {
                entries.insert("expect_status", status.to_string());
            }
        }
        Ok(entries)
    }
}

/// Whether cases of an operator have a key.
fn takes(operator: DeclaredOperator, key: &str) -> bool {
    let inference = operator == DeclaredOperator::FusedInferAttentionScore;
    let has = |parameter| operator.parameter_named(parameter).is_some();
    match key {
        "atten_mask_kind" => has("atten_mask"),
        "portable_since" | "rms_rtol" => inference,
        "out_dtype" => inference || operator == DeclaredOperator::PromptFlashAttention,
        "softmax_atol" | "softmax_rtol" | "group" | "group_role" => has("softmax_max"),
        _ => true,
    }
}

/// Whether some operator has an argument of this name that is no tensor.
fn is_any_argument(key: &str) -> bool {
    let mut operators = DeclaredOperator::ALL.iter();
    operators.any(|operator| {
        let parameter = operator.parameter_named(key);
        parameter.is_some_and(|parameter| !parameter.kind.is_tensor())
    })
}

fn foreign(operator: DeclaredOperator, key: &str) -> CaseError {
    CaseError::ForeignKey {
        key: key.to_owned(),
        op: operator.name(),
    }
}

impl MaskKind {
    /// The kind's name in a file.
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

fn op_version(operator: DeclaredOperator, value: &str) -> Result<u8, CaseError> {
    let most = operator.versions().count();
    let number = (1..=most).find(|number| number.to_string() == value);
    let number = number.and_then(|number| u8::try_from(number).ok());
    number.ok_or_else(|| {
        let expected = match most {
            1 => "1",
            2 => "1 or 2",
            3 => "1 to 3",
            4 => "1 to 4",
            _ => "1 to 5",
        };
        CaseError::malformed("op_version", value, expected)
    })
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

/// Writes a tolerance as text; refuses one that is negative or not finite.
fn written(key: &'static str, value: f64) -> Result<String, CaseError> {
    let text = format!("{value:?}");
    distance(key, &text).map(|_| text)
}
