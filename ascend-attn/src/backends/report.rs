//! The report on steps that two backends ran, as text and as JSON.

use std::time::Duration;

use ascend_serving::{BackendComparison, BackendDeviation, ServedStep, StepComparison};
use serde_json::{Value, json};

use crate::report::{counted, number};

pub(super) fn step_text(at: usize, step: &StepComparison) -> String {
    let side = |side: &ascend_serving::Result<ServedStep>| match side {
        Ok(served) => format!("{} {}", served.backend, milliseconds(served.time)),
        Err(why) => format!("refused ({why})"),
    };
    let [first, second] = &step.sides;
    let mut line = format!("step {at}, {:?}: {} and {}: ", step.state, side(first), side(second));
    line += &match step.elements {
        0 => "not compared".to_owned(),
        elements => format!("{} of {} equal", step.equal, counted(elements, "element", "elements")),
    };
    if let Some(furthest) = &step.furthest {
        line += &format!("; furthest apart by {}", place(furthest));
    }
    line
}

pub(super) fn sum_text(found: &BackendComparison) -> String {
    let [first, second] = found.times().map(milliseconds);
    let share = match found.equal_share() {
        Some(share) => format!("{:.2} % of {} elements equal", share * 100.0, found.elements()),
        None => "nothing was compared".to_owned(),
    };
    let mut line = format!(
        "{}, {} compared in {first} and {second}: {share}",
        counted(found.steps.len(), "step", "steps"),
        compared(found)
    );
    if let Some(furthest) = found.furthest() {
        line += &format!("; furthest apart in step {} by {}", furthest.step, place(furthest));
    }
    line
}

pub(super) fn step_json(at: usize, step: &StepComparison) -> Value {
    let side = |side: &ascend_serving::Result<ServedStep>| match side {
        Ok(served) => json!({ "backend": served.backend, "ms": in_milliseconds(served.time) }),
        Err(why) => json!({ "refused": why.to_string() }),
    };
    json!({
        "step": at,
        "state": format!("{:?}", step.state),
        "sides": step.sides.iter().map(side).collect::<Vec<_>>(),
        "elements": step.elements,
        "equal": step.equal,
        "furthest": step.furthest.as_ref().map(place_json),
    })
}

pub(super) fn sum_json(found: &BackendComparison) -> Value {
    json!({
        "steps": found.steps.len(),
        "compared": compared(found),
        "ms": found.times().map(in_milliseconds),
        "elements": found.elements(),
        "equal": found.equal(),
        "furthest": found.furthest().map(place_json),
    })
}

fn compared(found: &BackendComparison) -> usize {
    let steps = found.steps.iter();
    steps.filter(|step| step.elements > 0).count()
}

fn place(deviation: &BackendDeviation) -> String {
    let [first, second] = deviation.values;
    format!(
        "{:.2e} in layer {}, request {}, token {}, head {}, element {}: {first} and {second}",
        deviation.distance, deviation.layer, deviation.request, deviation.token, deviation.head, deviation.element
    )
}

fn place_json(deviation: &BackendDeviation) -> Value {
    json!({
        "step": deviation.step,
        "layer": deviation.layer,
        "request": deviation.request,
        "token": deviation.token,
        "head": deviation.head,
        "element": deviation.element,
        "values": deviation.values.map(number),
        "distance": number(deviation.distance),
    })
}

fn in_milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn milliseconds(time: Duration) -> String {
    format!("{:.2} ms", in_milliseconds(time))
}
