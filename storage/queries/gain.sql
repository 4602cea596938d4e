-- gain: what a round yields at each budget, read off the rounds that spent at least that much.
-- One row per policy and budget. Trees are nested: the tree of budget b is the first b nodes, so at budget b a round
-- accepts the longest prefix of its accepted path whose node indices are all <= b, plus the bonus token, and never more
-- than it committed after trimming. mat is the mean of that. (Not for scorers whose trees are not nested.)
-- Budgets with different num_rounds average over different rounds: comparable if budgets were drawn at random.
WITH budgets AS (
    SELECT unnest([0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]) AS b
)
SELECT
    s.target,
    s.policy,
    b AS budget,
    count(*) AS num_rounds,
    avg(least(len(list_filter(r.accepted, lambda node: node <= b)) + 1, r.num_tokens)) AS mat
FROM rounds r
JOIN sequences s USING (unit_id, attempt, sequence_id)
JOIN budgets ON b <= r.budget
WHERE r.kind = 'decoded'
GROUP BY s.target, s.policy, b
ORDER BY s.target, s.policy, b;
