//! The metadata of a case: the keys that every operator's cases have, and the arguments that are no tensors.

use std::collections::BTreeMap;

use ascend_spec::declared::{AnyArguments, DeclaredOperator};
use ascend_spec::operator::{Kind, OwnedValue, ParameterInfo, Value};
use ascend_spec::{Cann, DType};

use super::stored::{STORED, Stored};
use super::{Case, CaseError, Expect, MaskSource, Tolerance};

const FORMAT: &str = "ascend-attention-case";
const VERSION: &str = "1";

/// A key that gives no argument of the operator.
struct Key {
    name: &'static str,
    read: fn(&mut Case, &'static str, &str) -> Result<(), CaseError>,
    /// Returns the key's value; `None` if the case does without.
    write: fn(&Case<()>) -> Option<String>,
}

/// The keys in the order in which they are read, whatever their order in the file.
const KEYS: &[Key] = &[
    Key {
        name: "name",
        read: |case, _, text| {
            text.clone_into(&mut case.name);
            Ok(())
        },
        write: |case| Some(case.name.clone()).filter(|text| !text.is_empty()),
    },
    Key {
        name: "note",
        read: |case, _, text| {
            text.clone_into(&mut case.note);
            Ok(())
        },
        write: |case| Some(case.note.clone()).filter(|text| !text.is_empty()),
    },
    Key {
        name: "atten_mask_kind",
        read: |case, key, text| {
            let kind = MASK_KINDS.iter().find(|(_, name)| *name == text);
            let (kind, _) = kind.ok_or_else(|| CaseError::malformed(key, text, "`none`, `tensor` or `compressed`"))?;
            case.mask = *kind;
            Ok(())
        },
        write: |case| {
            let kind = MASK_KINDS.iter().find(|(kind, _)| *kind == case.mask);
            kind.map(|(_, name)| (*name).to_owned())
        },
    },
    Key {
        name: "expect",
        read: |case, key, text| {
            case.expect = match text {
                "ok" => Expect::Ok,
                "reject" => Expect::Reject { status: None },
                _ => return Err(CaseError::malformed(key, text, "`ok` or `reject`")),
            };
            Ok(())
        },
        write: |case| (case.expect != Expect::Ok).then(|| "reject".to_owned()),
    },
    Key {
        name: "expect_status",
        read: |case, key, text| {
            let code = i32::try_from(integer(key, text)?);
            let code = code.map_err(|_| CaseError::malformed(key, text, "an integer of 32 bits"))?;
            match &mut case.expect {
                Expect::Reject { status } => *status = Some(code),
                Expect::Ok => {
                    return Err(CaseError::Contradiction(
                        "there is an `expect_status`, but `expect` is not `reject`: leave it out, or expect the \
                         refusal",
                    ));
                }
            }
            Ok(())
        },
        write: |case| match case.expect {
            Expect::Reject { status } => Some(status?.to_string()),
            Expect::Ok => None,
        },
    },
    Key {
        name: "expect_rule",
        read: |case, _, text| {
            case.expect_rule = Some(text.to_owned());
            Ok(())
        },
        write: |case| case.expect_rule.clone(),
    },
    Key {
        name: "atol",
        read: |case, key, text| distance(key, text, &mut part(&mut case.tolerance).atol),
        write: |case| case.tolerance.map(|tolerance| shown(tolerance.atol)),
    },
    Key {
        name: "rtol",
        read: |case, key, text| distance(key, text, &mut part(&mut case.tolerance).rtol),
        write: |case| case.tolerance.map(|tolerance| shown(tolerance.rtol)),
    },
    Key {
        name: "softmax_atol",
        read: |case, key, text| distance(key, text, &mut part(&mut case.softmax_tolerance).atol),
        write: |case| case.softmax_tolerance.map(|tolerance| shown(tolerance.atol)),
    },
    Key {
        name: "softmax_rtol",
        read: |case, key, text| distance(key, text, &mut part(&mut case.softmax_tolerance).rtol),
        write: |case| case.softmax_tolerance.map(|tolerance| shown(tolerance.rtol)),
    },
    Key {
        name: "state_atol",
        read: |case, key, text| distance(key, text, &mut part(&mut case.state_tolerance).atol),
        write: |case| case.state_tolerance.map(|tolerance| shown(tolerance.atol)),
    },
    Key {
        name: "state_rtol",
        read: |case, key, text| distance(key, text, &mut part(&mut case.state_tolerance).rtol),
        write: |case| case.state_tolerance.map(|tolerance| shown(tolerance.rtol)),
    },
    Key {
        name: "exact_atol",
        read: |case, key, text| distance(key, text, &mut part(&mut case.exact_tolerance).atol),
        write: |case| case.exact_tolerance.map(|tolerance| shown(tolerance.atol)),
    },
    Key {
        name: "exact_rtol",
        read: |case, key, text| distance(key, text, &mut part(&mut case.exact_tolerance).rtol),
        write: |case| case.exact_tolerance.map(|tolerance| shown(tolerance.rtol)),
    },
    Key {
        name: "exact_state_atol",
        read: |case, key, text| distance(key, text, &mut part(&mut case.exact_state_tolerance).atol),
        write: |case| case.exact_state_tolerance.map(|tolerance| shown(tolerance.atol)),
    },
    Key {
        name: "exact_state_rtol",
        read: |case, key, text| distance(key, text, &mut part(&mut case.exact_state_tolerance).rtol),
        write: |case| case.exact_state_tolerance.map(|tolerance| shown(tolerance.rtol)),
    },
    Key {
        name: "state_rms_rtol",
        read: |case, key, text| distance(key, text, case.state_rms_rtol.get_or_insert(0.0)),
        write: |case| case.state_rms_rtol.map(shown),
    },
    Key { name: "state_strides", read: strides, write: written_strides },
    Key { name: "conv_states_strides", read: strides, write: written_strides },
    Key {
        name: "provider",
        read: |case, _, text| {
            case.provider = Some(text.to_owned());
            Ok(())
        },
        write: |case| case.provider.clone(),
    },
    Key {
        name: "rms_rtol",
        read: |case, key, text| distance(key, text, case.rms_rtol.get_or_insert(0.0)),
        write: |case| case.rms_rtol.map(shown),
    },
    Key {
        name: "soc",
        read: |case, _, text| {
            case.soc_name = Some(text.to_owned());
            Ok(())
        },
        write: |case| case.soc_name.clone(),
    },
    Key {
        name: "cann",
        read: |case, key, text| {
            case.cann = Some(release(key, text)?);
            Ok(())
        },
        write: |case| case.cann.map(|cann| format!("{}.0", cann.name())),
    },
    Key {
        name: "portable_since",
        read: |case, key, text| {
            case.portable_since = Some(release(key, text)?);
            Ok(())
        },
        write: |case| case.portable_since.map(|cann| format!("{}.0", cann.name())),
    },
    Key {
        name: "op_version",
        read: |case, key, text| {
            let most = case.operator().versions().count();
            let number = (1..=most).find(|number| number.to_string() == text);
            let number = number.and_then(|number| u8::try_from(number).ok());
            let known = || {
                let allowed = match most {
                    1 => "1",
                    2 => "1 or 2",
                    3 => "1 to 3",
                    4 => "1 to 4",
                    _ => "1 to 5",
                };
                CaseError::malformed(key, text, allowed)
            };
            case.op_version = Some(number.ok_or_else(known)?);
            Ok(())
        },
        write: |case| case.op_version.map(|number| number.to_string()),
    },
    Key {
        name: "out_dtype",
        read: |case, key, text| {
            let dtype = DType::ALL.iter().find(|dtype| dtype_name(**dtype) == text);
            let unknown = || CaseError::malformed(key, text, "an element type, such as `int8`");
            case.out_dtype = Some(*dtype.ok_or_else(unknown)?);
            Ok(())
        },
        write: |case| case.out_dtype.map(dtype_name),
    },
    Key {
        name: "group",
        read: |case, _, text| {
            case.group = Some((text.to_owned(), String::new()));
            Ok(())
        },
        write: |case| case.group.as_ref().map(|(group, _)| group.clone()),
    },
    Key {
        name: "group_role",
        read: |case, _, text| match &mut case.group {
            Some((_, role)) => {
                text.clone_into(role);
                Ok(())
            }
            None => Err(GROUP),
        },
        write: |case| case.group.as_ref().map(|(_, role)| role.clone()),
    },
];

const GROUP: CaseError = CaseError::Contradiction("`group` and `group_role` go together: give both, or neither");

/// A truth value in files, and in some operators an integer.
const LSE_FLAG: &str = "softmax_lse_flag";

/// Mask kinds with their names in files.
const MASK_KINDS: [(MaskSource, &str); 3] =
    [(MaskSource::None, "none"), (MaskSource::Tensor, "tensor"), (MaskSource::Compressed, "compressed")];

/// Whether cases of an operator have a key.
pub(super) fn takes(operator: DeclaredOperator, key: &str) -> bool {
    let inference = operator == DeclaredOperator::FusedInferAttentionScore;
    let has = |parameter| operator.parameter_named(parameter).is_some();
    match key {
        "atten_mask_kind" => has("atten_mask"),
        "portable_since" => inference,
        "rms_rtol" => inference || has("final_state"),
        "state_rms_rtol" | "exact_atol" | "exact_rtol" | "exact_state_atol" | "exact_state_rtol" => has("final_state"),
        "state_atol" | "state_rtol" | "provider" => has("state") || has("final_state") || has("conv_states"),
        "state_strides" => has("state"),
        // CausalConv1d reads contiguous lines alone.
        "conv_states_strides" => has("conv_states") && operator != DeclaredOperator::CausalConv1d,
        "out_dtype" => inference || operator == DeclaredOperator::PromptFlashAttention,
        "softmax_atol" | "softmax_rtol" => has("softmax_max") || operator == DeclaredOperator::BlockSparseAttention,
        "group" | "group_role" => has("softmax_max") || has("state") || has("final_state"),
        _ => true,
    }
}

/// The operator that the metadata of a file names.
pub(super) fn operator(metadata: &[(String, String)]) -> Result<DeclaredOperator, CaseError> {
    let find = |key: &'static str| value(metadata, key).ok_or(CaseError::MissingKey(key));
    // `format`, `version` and `op` come first: they decide what the other keys mean.
    if let Some(format) = Some(find("format")?).filter(|format| *format != FORMAT) {
        return Err(CaseError::UnknownFormat(format.to_owned()));
    }
    if let Some(version) = Some(find("version")?).filter(|version| *version != VERSION) {
        return Err(CaseError::UnknownVersion(version.to_owned()));
    }
    let op = find("op")?;
    DeclaredOperator::from_name(op).ok_or_else(|| CaseError::UnknownOp(op.to_owned()))
}

/// The value of a key.
pub(super) fn value<'m>(metadata: &'m [(String, String)], key: &str) -> Option<&'m str> {
    let entry = metadata.iter().find(|(name, _)| name == key);
    entry.map(|(_, value)| value.as_str())
}

/// Reads the metadata of a case of an operator. Also returns the element types of tensors that are stored as U8.
pub(super) fn read(metadata: &[(String, String)], operator: DeclaredOperator) -> Result<(Case, Stored), CaseError> {
    let mut case = Case::new("", AnyArguments::new(operator));
    let mut stored = Stored::default();
    for (key, value) in metadata {
        let foreign = || CaseError::ForeignKey { key: key.clone(), op: operator.name() };
        if let Some(parameter) = operator.parameter_named(key)
            && let Some(value) = read_value(parameter, value)?
        {
            (case.arguments.set_value(key, value)).map_err(|_| foreign())?;
            continue;
        }
        match key.as_str() {
            "format" | "version" | "op" => {}
            _ if KEYS.iter().any(|known| known.name == key) => {
                if !takes(operator, key) {
                    return Err(foreign());
                }
            }
            _ => match key.strip_prefix(STORED) {
                Some(tensor) => stored.insert_type(tensor, value)?,
                None if is_any_argument(key) => return Err(foreign()),
                None => {
                    let own = operator.parameters().map(|known| known.name);
                    let known = own.chain(KEYS.iter().map(|known| known.name));
                    return Err(CaseError::unknown_key(key, known));
                }
            },
        }
    }
    for key in KEYS {
        if let Some(value) = value(metadata, key.name) {
            (key.read)(&mut case, key.name, value)?;
        }
    }
    match &case.group {
        Some((_, role)) if role.is_empty() => Err(GROUP),
        _ => Ok((case, stored)),
    }
}

/// Writes the metadata of a case of an operator, without its arguments.
pub(super) fn write(case: &Case<()>, operator: DeclaredOperator) -> Result<BTreeMap<&'static str, String>, CaseError> {
    let mut entries = BTreeMap::from([
        ("format", FORMAT.to_owned()),
        ("version", VERSION.to_owned()),
        ("op", operator.name().to_owned()),
    ]);
    for key in KEYS.iter().filter(|key| takes(operator, key.name)) {
        let Some(text) = (key.write)(case) else {
            continue;
        };
        if key.name.ends_with("tol") {
            distance(key.name, &text, &mut 0.0)?;
        }
        entries.insert(key.name, text);
    }
    Ok(entries)
}

/// Whether some operator has an argument of this name that is no tensor.
fn is_any_argument(key: &str) -> bool {
    let mut operators = DeclaredOperator::ALL.iter();
    operators.any(|operator| {
        let parameter = operator.parameter_named(key);
        parameter.is_some_and(|parameter| !parameter.kind.is_tensor())
    })
}

/// A release; with a plus sign behind it the next one, for what came after it and before the next had a name.
fn release(key: &'static str, value: &str) -> Result<Cann, CaseError> {
    let (name, later) = value.strip_suffix('+').map_or((value, false), |name| (name, true));
    let named = name.parse::<Cann>().ok();
    let next = |named: Cann| Cann::ALL.into_iter().find(|cann| *cann > named);
    let release = if later { named.and_then(next) } else { named };
    release.ok_or_else(|| {
        let allowed = "a release whose contract is known: 8.1 to 9.1, and 9.2 as a preview";
        CaseError::malformed(key, value, allowed)
    })
}

/// The name of an element type in the metadata.
fn dtype_name(dtype: DType) -> String {
    match dtype {
        DType::Bf16 => "bfloat16".to_owned(),
        _ => dtype.name().to_lowercase(),
    }
}

/// Reads the strides of a pool of states or lines.
fn strides(case: &mut Case, key: &'static str, text: &str) -> Result<(), CaseError> {
    let strides = serde_json::from_str(text);
    case.state_strides = Some(strides.map_err(|_| CaseError::malformed(key, text, "a JSON list of integers"))?);
    Ok(())
}

fn written_strides(case: &Case<()>) -> Option<String> {
    case.state_strides.as_ref().map(|strides| format!("{strides:?}"))
}

/// The tolerance that one of its parts is given to.
fn part(tolerance: &mut Option<Tolerance>) -> &mut Tolerance {
    tolerance.get_or_insert_default()
}

/// Reads a tolerance, which is neither negative nor infinite.
fn distance(key: &'static str, value: &str, to: &mut f64) -> Result<(), CaseError> {
    *to = number(key, value)?;
    match *to < 0.0 {
        true => Err(CaseError::malformed(key, value, "a number of at least 0")),
        false => Ok(()),
    }
}

/// A number as text from which the same number is read.
fn shown(number: f64) -> String {
    format!("{number:?}")
}

/// Reads the value that an entry gives to a parameter; `None` for a tensor parameter.
pub(super) fn read_value(parameter: &ParameterInfo, text: &str) -> Result<Option<OwnedValue>, CaseError> {
    let name = parameter.name;
    let malformed = |allowed| CaseError::malformed(name, text, allowed);
    Ok(Some(match parameter.kind {
        Kind::Tensor | Kind::TensorList | Kind::InOut | Kind::Output => return Ok(None),
        Kind::Int if name == LSE_FLAG && (text == "true" || text == "false") => {
            OwnedValue::Int((text == "true").into())
        }
        Kind::Int | Kind::Int8 => OwnedValue::Int(integer(name, text)?),
        Kind::Float => OwnedValue::Float(number(name, text)?),
        Kind::Flag => OwnedValue::Flag(text.parse().map_err(|_| malformed("`true` or `false`"))?),
        Kind::Text | Kind::OptionalText => OwnedValue::Text(Some(text.to_owned())),
        Kind::Ints | Kind::IntList => {
            let list = serde_json::from_str(text);
            OwnedValue::Ints(Some(list.map_err(|_| malformed("a JSON list of integers"))?))
        }
    }))
}

/// Writes the entry that [`read_value`] reads a call's value from; `None` for a tensor, for a null pointer, and for the
/// default of an argument that the operator's first version lacks, since readers may know that version alone.
pub(super) fn value_text<T>(
    arguments: &AnyArguments<T>,
    parameter: &ParameterInfo,
) -> Result<Option<String>, CaseError> {
    let name = parameter.name;
    let Some(value) = arguments.value(name) else {
        return Ok(None);
    };
    let plain = AnyArguments::<()>::new(arguments.operator());
    if parameter.since > 1 && plain.value(name) == Some(value) {
        return Ok(None);
    }
    Ok(match value {
        Value::Int(flag @ 0..=1) if name == LSE_FLAG => Some((flag == 1).to_string()),
        Value::Int(value) => Some(value.to_string()),
        Value::Float(value) => {
            let text = shown(value);
            number(parameter.name, &text)?;
            Some(text)
        }
        Value::Flag(value) => Some(value.to_string()),
        Value::Text(text) => text.map(str::to_owned),
        Value::Ints(values) => values.map(|values| format!("{values:?}")),
    })
}

fn integer(key: &'static str, value: &str) -> Result<i64, CaseError> {
    value.parse().map_err(|_| CaseError::malformed(key, value, "a decimal integer of 64 bits"))
}

fn number(key: &'static str, value: &str) -> Result<f64, CaseError> {
    let parsed: Option<f64> = value.parse().ok();
    parsed
        .filter(|number| number.is_finite())
        .ok_or_else(|| CaseError::malformed(key, value, "a finite decimal number"))
}
