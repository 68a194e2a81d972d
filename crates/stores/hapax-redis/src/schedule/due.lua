-- Loads entries that are due, earliest first.
--
-- KEYS     entries, then due:QUEUE for each queue
-- ARGV[1]  limit of entries
-- ARGV[2]  bytes of notes after which there is no further one
--
-- Returns the first key, the time, the time at which the first further entry is or was due (nil without
-- one), and for each entry its member, its time and its value.
local limit, bytes = tonumber(ARGV[1]), tonumber(ARGV[2])
local further
local function later(due)
  if due and not (further and further <= due) then
    further = due
  end
end

local found = {}
for number = 2, #KEYS do
  local first, failed = call('ZRANGE', KEYS[number], 0, 0, 'WITHSCORES')
  if failed then
    return failed
  end
  local due = tonumber(first[2])
  if due and due <= now then
    local range = redis.call('ZRANGEBYSCORE', KEYS[number], '-inf', digits(now), 'WITHSCORES',
      'LIMIT', '0', digits(limit + 1))
    for at = 1, math.min(#range, 2 * limit), 2 do
      table.insert(found, {range[at], tonumber(range[at + 1])})
    end
    if #range > 2 * limit then
      due = tonumber(range[#range])
    else
      local rest = redis.call('ZRANGEBYSCORE', KEYS[number], '(' .. digits(now), '+inf',
        'WITHSCORES', 'LIMIT', '0', '1')
      due = tonumber(rest[2])
    end
  end
  later(due)
end

-- Strings are compared by bytes: Lua's own comparison uses the server's locale.
local function precedes(one, other)
  for at = 1, #one do
    local byte, against = string.byte(one, at), string.byte(other, at)
    if byte ~= against then
      return byte < (against or 0)
    end
  end
  return false
end
if #KEYS > 2 then
  table.sort(found, function(one, other)
    if one[2] == other[2] then
      return precedes(one[1], other[1])
    end
    return one[2] < other[2]
  end)
end

local entries, count, size = {}, 0, 0
for _, entry in ipairs(found) do
  if count == limit or size >= bytes then
    later(entry[2])
    break
  end
  local value, failed = call('HGET', KEYS[1], entry[1])
  if failed then
    return failed
  end
  if value then
    count = count + 1
    size = size + #value
    entries[3 * count - 2] = entry[1]
    entries[3 * count - 1] = digits(entry[2])
    entries[3 * count] = value
  end
end
return {KEYS[1], digits(now), further and digits(further) or false, entries}
