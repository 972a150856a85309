//! A prepared call of an operator with few tensors: checked launches with other tensors of the same shapes.

use std::ffi::c_void;
use std::fmt;
use std::ptr;
use std::sync::Arc;

use ascend_spec::{OperatorVersion, TensorDesc};
use ascend_sys::bindings::{self as sys, aclOpExecutor, aclTensor, aclTensorList};
use ascend_sys::{Api, Library, MissingSymbol};
use smallvec::{SmallVec, smallvec};

use crate::error::{Error, Result, aclnn, aclnn_error};
use crate::memory::overlap;
use crate::runtime::Context;
use crate::tensor::AnyTensor;

use super::{Executor, Launches, Owned, Queue, tensor, tensor_list};

/// Where a tensor stands in the operator's argument list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Input(usize),
    Output(usize),
    /// Changed in place: an input and an output.
    InOut {
        input: usize,
        output: usize,
    },
    /// Of a list input. Elements of a list follow each other in [`Prepared`]'s operands.
    Element {
        input: usize,
        element: usize,
    },
}

impl Place {
    fn is_written(self) -> bool {
        matches!(self, Place::Output(_) | Place::InOut { .. })
    }
}

/// A tensor of the call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operand {
    pub(crate) name: &'static str,
    pub(crate) place: Place,
    pub(crate) desc: TensorDesc,
}

type PhaseTwo = unsafe extern "C" fn(
    *mut c_void,
    u64,
    *mut aclOpExecutor,
    sys::aclrtStream,
) -> sys::aclnnStatus;

/// The functions of an operator.
#[derive(Clone, Copy)]
pub(crate) struct Symbols {
    pub(crate) operator: OperatorVersion,
    /// What to do where the installed CANN has no such operator.
    pub(crate) instead: &'static str,
    pub(crate) phase_one: fn(&Api) -> Result<(), MissingSymbol>,
    pub(crate) phase_two: fn(&Api) -> Result<PhaseTwo, MissingSymbol>,
}

impl Symbols {
    /// Phase two, if both phases are installed.
    fn find(&self, api: &Api) -> Result<PhaseTwo> {
        match ((self.phase_one)(api), (self.phase_two)(api)) {
            (Ok(()), Ok(phase_two)) => Ok(phase_two),
            _ => Err(Error::MissingOperator {
                operator: self.operator.symbol(),
                library: Library::Opapi.file_name(),
                since: self.operator.since_cann(),
                instead: self.instead,
            }),
        }
    }
}

/// The descriptors that an executor is made of.
#[derive(Debug)]
pub(crate) struct Handles {
    /// By operand; elements of lists are in their lists.
    tensors: Vec<Option<Owned<aclTensor>>>,
    /// With the input that each is.
    lists: Vec<(usize, Owned<aclTensorList>)>,
}

impl Handles {
    fn new(
        context: &Arc<Context>,
        operands: &[Operand],
        address: impl Fn(usize) -> *mut c_void,
    ) -> Result<Self> {
        let mut tensors = Vec::new();
        let mut lists: Vec<(usize, SmallVec<[Owned<aclTensor>; 1]>)> = Vec::new();
        for (index, operand) in operands.iter().enumerate() {
            let made = tensor(context, &operand.desc, address(index))?;
            match operand.place {
                Place::Element { input, .. } => {
                    tensors.push(None);
                    match lists.last_mut() {
                        Some((last, members)) if *last == input => members.push(made),
                        _ => lists.push((input, smallvec![made])),
                    }
                }
                _ => tensors.push(Some(made)),
            }
        }
        let lists = lists
            .into_iter()
            .map(|(input, members)| tensor_list(context, members).map(|list| (input, list)));
        Ok(Self {
            tensors,
            lists: lists.collect::<Result<_>>()?,
        })
    }

    /// The tensor of an operand; null for elements of lists.
    pub(crate) fn tensor(&self, operand: usize) -> *mut aclTensor {
        let tensor = self.tensors.get(operand).and_then(Option::as_ref);
        tensor.map_or(ptr::null_mut(), Owned::as_ptr)
    }

    /// The list that is an input; null if none is.
    pub(crate) fn list(&self, input: usize) -> *mut aclTensorList {
        let list = self.lists.iter().find(|(known, _)| *known == input);
        list.map_or(ptr::null_mut(), |(_, list)| list.as_ptr())
    }
}

/// The executor, and the address of each operand that it has now, if that is known.
struct State {
    executor: Executor<Handles>,
    addresses: Vec<Option<usize>>,
}

/// A call that was checked and prepared.
pub(crate) struct Prepared {
    operator: OperatorVersion,
    phase_two: PhaseTwo,
    operands: Vec<Operand>,
    launches: Launches<State>,
}

impl Prepared {
    /// Prepares a call that the contract has accepted. `phase_one` calls the operator's function of that name; `stand_in`
    /// is the address of all tensors until a launch replaces it.
    pub(crate) fn new(
        context: &Arc<Context>,
        symbols: &Symbols,
        operands: Vec<Operand>,
        stand_in: *mut c_void,
        phase_one: impl FnOnce(&Api, &Handles, &mut u64, &mut *mut aclOpExecutor) -> Result<()>,
    ) -> Result<Self> {
        let phase_two = symbols.find(context.runtime().api())?;
        let api = context.bind()?;
        let handles = Handles::new(context, &operands, |_| stand_in)?;
        let (mut bytes, mut raw) = (0, ptr::null_mut());
        phase_one(api, &handles, &mut bytes, &mut raw)?;
        // SAFETY: phase one made the executor of these descriptors.
        let executor = unsafe { Executor::new(context, symbols.operator.symbol(), raw, handles) }?;
        let state = State {
            executor,
            addresses: vec![Some(stand_in.addr()); operands.len()],
        };
        Ok(Self {
            operator: symbols.operator,
            phase_two,
            operands,
            launches: Launches::new(context, bytes, state)?,
        })
    }

    pub(crate) fn workspace_bytes(&self) -> usize {
        self.launches.workspace_bytes()
    }

    /// Queues the call with the tensors that `given` has for the operands, by their order.
    ///
    /// Allocates no host memory from the second launch on a stream on.
    pub(crate) fn run<'a>(
        &self,
        queue: &impl Queue,
        given: &dyn Fn(usize) -> Option<&'a AnyTensor>,
    ) -> Result<()> {
        self.launches.check_device(queue)?;
        self.check(given)?;
        let operands = 0..self.operands.len();
        self.launches.queue(
            queue,
            |api, state| {
                operands.clone().try_for_each(|index| {
                    let address = given(index).map_or(ptr::null_mut(), AnyTensor::as_raw);
                    self.point(api, state, index, address)
                })
            },
            |state, slot| {
                let (at, executor) = (slot.workspace, state.executor.as_ptr());
                // SAFETY: the executor is repeatable; the tensors are laid out as planned, as checked; they and the
                // workspace are kept for as long as the launch may use them, and borrowed until then.
                match unsafe { (self.phase_two)(at, slot.bytes, executor, slot.stream) } {
                    sys::ACLNN_SUCCESS => Ok(()),
                    failed => Err(aclnn_error(slot.api, self.operator.symbol(), failed)),
                }
            },
            |queued| {
                for tensor in operands.clone().filter_map(given) {
                    queued.keep(tensor.memory());
                }
                Ok(())
            },
        )
    }

    /// Refuses tensors that are not as planned, and outputs that share memory with another tensor.
    fn check<'a>(&self, given: &dyn Fn(usize) -> Option<&'a AnyTensor>) -> Result<()> {
        for (index, operand) in self.operands.iter().enumerate() {
            let Some(tensor) = given(index) else {
                return Err(not_as_planned(operand, "no tensor"));
            };
            tensor.on(operand.name, self.launches.context())?;
            if *tensor.desc() != operand.desc {
                return Err(not_as_planned(operand, tensor.desc()));
            }
        }
        for (index, operand) in self.operands.iter().enumerate() {
            let Some(written) = given(index).filter(|_| operand.place.is_written()) else {
                continue;
            };
            written.memory().writable(operand.name)?;
            let at = written.addresses();
            for (other, with) in self.operands.iter().enumerate() {
                let addresses = given(other).map_or(0..0, AnyTensor::addresses);
                if other != index && overlap(&at, &addresses) {
                    return Err(Error::invalid(
                        operand.name,
                        format_args!("memory that is shared with {}", with.name),
                        "memory of its own",
                    ));
                }
            }
        }
        Ok(())
    }

    /// Sees to it that the executor has an operand's address. The device must be bound.
    fn point(&self, api: &Api, state: &mut State, index: usize, at: *mut c_void) -> Result<()> {
        let (Some(operand), Some(now)) = (self.operands.get(index), state.addresses.get_mut(index))
        else {
            return Ok(());
        };
        if *now == Some(at.addr()) {
            return Ok(());
        }
        // A failure in between leaves it open.
        *now = None;
        let executor = state.executor.as_ptr();
        let handles = state.executor.descriptors();
        let tensor = handles.tensor(index);
        // SAFETY: the executor is repeatable and alive, the descriptor is the one that it was made of, and the memory is
        // laid out as planned, as checked.
        unsafe {
            match operand.place {
                Place::Input(input) => {
                    aclnn!(api, aclSetInputTensorAddr(executor, input, tensor, at))
                }
                Place::Output(output) => {
                    aclnn!(api, aclSetOutputTensorAddr(executor, output, tensor, at))
                }
                Place::InOut { input, output } => {
                    aclnn!(api, aclSetInputTensorAddr(executor, input, tensor, at))?;
                    aclnn!(api, aclSetOutputTensorAddr(executor, output, tensor, at))
                }
                Place::Element { input, element } => aclnn!(
                    api,
                    aclSetDynamicInputTensorAddr(executor, input, element, handles.list(input), at)
                ),
            }
        }?;
        *now = Some(at.addr());
        Ok(())
    }
}

#[cold]
fn not_as_planned(operand: &Operand, given: impl fmt::Display) -> Error {
    Error::NotAsPlanned {
        argument: operand.name,
        given: given.to_string(),
        planned: operand.desc.to_string(),
    }
}

impl fmt::Debug for Prepared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prepared")
            .field("operator", &self.operator)
            .field("workspace_bytes", &self.workspace_bytes())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use ascend_sys::Functions;

    use super::*;

    const SYMBOLS: Symbols = Symbols {
        operator: OperatorVersion::ScatterPaKvCache,
        instead: "do without",
        phase_one: |api| api.aclnnScatterPaKvCacheGetWorkspaceSize().map(drop),
        phase_two: |api| api.aclnnScatterPaKvCache(),
    };

    #[test]
    fn an_operator_that_is_not_installed_is_named_with_its_release() {
        let old = Api::from_functions(Functions::default(), "CANN 8.1");
        let missing = SYMBOLS.find(&old).unwrap_err();
        assert!(matches!(
            missing,
            Error::MissingOperator {
                operator: "aclnnScatterPaKvCache",
                ..
            }
        ));
        assert_eq!(
            missing.to_string(),
            "libopapi.so does not export aclnnScatterPaKvCache: it comes with CANN after 8.1; install a newer release, \
             or do without"
        );
    }
}
