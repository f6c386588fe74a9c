"""The plan of a model that a person serves: by fresh figures, and no worse than a recent plan without a reason."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from edgepipe.backend.types import StageSettings
from edgepipe.daemon.files.models import LocalModel
from edgepipe.daemon.serving.recent_surveys import RecentSurveys, change_note, is_worse
from edgepipe.daemon.serving.replanning import demand_of
from edgepipe.daemon.serving.survey import PlannedModel, Surveyor
from edgepipe.errors import EdgepipeError
from edgepipe.planner.cluster import Cluster
from edgepipe.planner.constraints import Constraints
from edgepipe.planner.demand import Demand
from edgepipe.planner.plan import Plan, plan
from edgepipe.planner.replicas import Layout, best_layout, layout_of, layouts_text
from edgepipe.wire.serving import ServeRequest, SurveyReply
from edgepipe.wire.surveys import cluster_of


class ServePlanner:
    """Measures the cluster and plans."""

    def __init__(self, surveyor: Surveyor) -> None:
        self._surveyor = surveyor
        self._recent = RecentSurveys()

    async def survey(
        self, model: PlannedModel, settings: StageSettings, *, fresh: bool = False, to_serve: bool = False
    ) -> SurveyReply:
        """Collect the inputs of a model's plan, and keep those of a stored model for comparison."""
        survey = await self._surveyor.survey(model, settings, fresh=fresh, to_serve=to_serve)
        if model.manifest_hash:
            self._recent.keep((model.manifest_hash, settings.of_layer()), survey, now_s=_now_s())
        return survey

    async def plan(
        self,
        request: ServeRequest,
        model: LocalModel,
        context: int,
        shut: dict[str, EdgepipeError],
        changes: list[str],
    ) -> Plan:
        """Find the best placement that the request allows. Measure again before accepting a slower placement than the
        figures of the last minutes give.

        context  tokens per conversation
        shut     why nodes cannot be used, by id; gets the nodes that others do not reach
        changes  gets a sentence if a plan of the last minutes no longer holds

        Raises like ``edgepipe.planner.plan.plan``.
        """
        settings = request.options.settings
        recent = self._recent.get((model.manifest_hash, settings.of_layer()), now_s=_now_s())
        survey = await self.survey(model, settings, to_serve=True)
        found = await _best(request, model, context, survey, shut)
        if recent is None:
            return found
        age_s, before = recent
        try:
            earlier = await _best(request, model, context, before, dict(shut))
        except EdgepipeError:
            return found  # nodes that were there then do not fit this request
        if is_worse(found, earlier):
            survey = await self.survey(model, settings, fresh=True)
            found = await _best(request, model, context, survey, shut)
            if is_worse(found, earlier):
                changes.append(change_note(earlier, age_s=age_s, before=before, now=survey))
        return found

    async def layout(
        self,
        request: ServeRequest,
        model: LocalModel,
        context: int,
        shut: dict[str, EdgepipeError],
        changes: list[str],
    ) -> Layout:
        """Find the best pipelines over disjoint machines: as many as asked for, or as many as give most.

        Parameters as for ``plan``. Raises like ``edgepipe.planner.replicas``.
        """
        survey = await self.survey(model, request.options.settings, to_serve=True)
        demand, cluster, constraints = _inputs(request, model, context, survey, shut)
        if not request.options.auto_replicas:
            count = request.options.num_replicas
            return await asyncio.to_thread(layout_of, demand, cluster.machines, cluster.links, constraints, count=count)
        layouts = await asyncio.to_thread(best_layout, demand, cluster.machines, cluster.links, constraints)
        changes.append(layouts_text(layouts))
        return layouts[0]


async def _best(
    request: ServeRequest, model: LocalModel, context: int, survey: SurveyReply, shut: dict[str, EdgepipeError]
) -> Plan:
    """Find the best placement by a survey's figures. See ``ServePlanner.plan``."""
    demand, cluster, constraints = _inputs(request, model, context, survey, shut)
    return await asyncio.to_thread(plan, demand, cluster.machines, cluster.links, constraints, explain=False)


def _inputs(
    request: ServeRequest, model: LocalModel, context: int, survey: SurveyReply, shut: dict[str, EdgepipeError]
) -> tuple[Demand, Cluster, Constraints]:
    """Return what the planner searches; ``shut`` gets the nodes that others do not reach."""
    for machine in survey.machines:
        if machine.obstacle is not None:
            shut.setdefault(machine.node_id, machine.obstacle)
    present = {machine.node_id for machine in survey.machines}
    cluster = cluster_of(survey)
    options = request.options
    asked = replace(options, settings=replace(options.settings, context_length=context))
    must_keep_tokens = context if request.must_keep_context else 0
    demand = demand_of(model.config, asked, weights=model.weights, must_keep_tokens=must_keep_tokens)
    constraints = Constraints(
        num_nodes=options.num_nodes,
        exclude=(*options.exclude, *(node_id for node_id in shut if node_id in present)),
        first=options.first,
        experts_in_ram=options.experts_in_ram,
    )
    return demand, cluster, constraints


def _now_s() -> float:
    """Return the running loop's time."""
    return asyncio.get_running_loop().time()
