//! The report on steps that two backends ran, as text and as JSON.

use std::time::Duration;

use ascend_serving::{FurthestElement, StepComparison};
use serde_json::{Value, json};

use crate::report::{counted, number};

/// The sums of all steps.
pub(super) struct Sums<'a> {
    steps: usize,
    compared: usize,
    /// The times of both sides for the steps that both served.
    times: [Duration; 2],
    /// Elements compared.
    pub(super) elements: usize,
    equal: usize,
    /// The first of the elements that are furthest apart, and its step.
    pub(super) furthest: Option<(usize, &'a FurthestElement)>,
}

impl<'a> Sums<'a> {
    pub(super) fn of(found: &'a [StepComparison]) -> Self {
        let served = |step: &&StepComparison| step.backends.iter().all(Result::is_ok);
        let furthest = found.iter().enumerate().filter_map(|(at, step)| Some((at, step.furthest.as_ref()?)));
        Self {
            steps: found.len(),
            compared: found.iter().filter(|step| step.deviation.elements > 0).count(),
            times: [0, 1].map(|side| found.iter().filter(served).map(|step| step.times[side]).sum()),
            elements: found.iter().map(|step| step.deviation.elements).sum(),
            equal: found.iter().map(|step| step.deviation.equal).sum(),
            furthest: furthest.reduce(|most, next| if next.1.distance > most.1.distance { next } else { most }),
        }
    }

    pub(super) fn text(&self) -> String {
        let [first, second] = self.times.map(milliseconds);
        let share = match self.elements {
            0 => "nothing was compared".to_owned(),
            elements => format!("{:.2} % of {elements} elements equal", self.equal as f64 / elements as f64 * 100.0),
        };
        let mut line = format!(
            "{}, {} compared in {first} and {second}: {share}",
            counted(self.steps, "step", "steps"),
            self.compared
        );
        if let Some((step, furthest)) = self.furthest {
            line += &format!("; furthest apart in step {step} by {}", place(furthest));
        }
        line
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "steps": self.steps,
            "compared": self.compared,
            "ms": self.times.map(in_milliseconds),
            "elements": self.elements,
            "equal": self.equal,
            "furthest": self.furthest.map(|(step, furthest)| place_json(step, furthest)),
        })
    }
}

pub(super) fn step_text(at: usize, step: &StepComparison) -> String {
    let side = |side: usize| match &step.backends[side] {
        Ok(backend) => format!("{backend} {}", milliseconds(step.times[side])),
        Err(why) => format!("refused ({why})"),
    };
    let mut line = format!("step {at}, {:?}: {} and {}: ", step.state, side(0), side(1));
    line += &match step.deviation.elements {
        0 => "not compared".to_owned(),
        elements => format!("{} of {} equal", step.deviation.equal, counted(elements, "element", "elements")),
    };
    if let Some(furthest) = &step.furthest {
        line += &format!("; furthest apart by {}", place(furthest));
    }
    line
}

pub(super) fn step_json(at: usize, step: &StepComparison) -> Value {
    let side = |side: usize| match &step.backends[side] {
        Ok(backend) => json!({ "backend": backend, "ms": in_milliseconds(step.times[side]) }),
        Err(why) => json!({ "refused": why.to_string() }),
    };
    json!({
        "step": at,
        "state": format!("{:?}", step.state),
        "sides": [side(0), side(1)],
        "elements": step.deviation.elements,
        "equal": step.deviation.equal,
        "furthest": step.furthest.as_ref().map(|furthest| place_json(at, furthest)),
    })
}

fn place(deviation: &FurthestElement) -> String {
    let [first, second] = deviation.values;
    format!(
        "{:.2e} in layer {}, request {}, token {}, head {}, element {}: {first} and {second}",
        deviation.distance, deviation.layer, deviation.request, deviation.token, deviation.head, deviation.element
    )
}

fn place_json(step: usize, deviation: &FurthestElement) -> Value {
    json!({
        "step": step,
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
